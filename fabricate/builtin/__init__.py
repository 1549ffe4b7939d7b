"""Plugins that ship with fabricate; each uses public names only, like a third party's."""
