"""`python -m fpmsdk.fake_engine`: the fake engine of `fpmsdk.collect.fake_engine`."""

from fpmsdk.collect.fake_engine import main

if __name__ == "__main__":
    main()
