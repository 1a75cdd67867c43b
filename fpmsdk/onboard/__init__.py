"""Onboarding of a model, from its `config.json` to a resolved profile: one module a stage.

Source: onboarding.md.
"""
