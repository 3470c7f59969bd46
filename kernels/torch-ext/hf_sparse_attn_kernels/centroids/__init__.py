"""Selection of clusters of keys by their centroids."""
