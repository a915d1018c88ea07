"""The front door: the command line, the one configuration file, and the rooms composed into a running stack."""
