"""Where clients run: in this process, on Ray, behind a SuperLink."""
