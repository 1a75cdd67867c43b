"""Drop-in forms of fpmsdk for programs written against other packages. Nothing of fpmsdk imports it.

Source: clients.md.
"""
