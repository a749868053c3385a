"""The `fedcross` command and its subcommands, one file each."""
