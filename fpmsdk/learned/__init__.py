"""Files of learned estimators: artifacts, features, identity, training. The model objects are in `fpmsdk.perfmodel`."""
