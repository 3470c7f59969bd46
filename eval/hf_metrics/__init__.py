"""The scores as metrics of the ``evaluate`` library, one file each, loadable by path."""
