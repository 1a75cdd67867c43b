"""Documents that workflows keep on disk: their canonical bytes, digests, evidence references, locks and strict models.

What the documents say belongs to `fpmsdk.collect` and `fpmsdk.onboard`.
"""
