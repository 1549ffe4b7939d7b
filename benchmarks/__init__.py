"""The overhead of fabricate, measured against a hand-written loop and other frameworks. `make bench` runs everything."""
