"""Search the deployments that serve a workload best: every candidate is a prediction, scored and ranked.

Source: predict-recommend.md sections 6 to 10.
"""
