"""The built-in callbacks, one per file. They use only public names, like callbacks of users."""
