class ServingView:
    """A frozen estimator, priced with from compiled code."""
