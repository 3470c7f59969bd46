"""Clusters of keys: k-means, the index that ops look clusters up in, and the thresholds of Squeezed Attention."""
