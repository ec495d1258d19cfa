"""What a model computes, recorded once as a graph with its gradients."""
