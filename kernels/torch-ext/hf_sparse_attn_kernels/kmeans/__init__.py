"""The two steps of a k-means iteration: assignment to the nearest centre, and sums of the clusters' members."""
