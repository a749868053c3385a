"""The actions of ``fedcross deploy``; :mod:`server.commands.deploy` defines their command line."""
