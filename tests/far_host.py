"""An address of this machine that connections from it do not come from, as those of another host."""

FAR = "127.0.0.2"
