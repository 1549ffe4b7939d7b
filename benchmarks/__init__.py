"""What fabricate costs, measured against a hand-written loop and against other frameworks. `make bench` runs everything."""
