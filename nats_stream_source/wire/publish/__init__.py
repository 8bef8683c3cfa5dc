"""Publishing as columns: frames and header blocks from Arrow arrays, PubAcks as arrays. Pure."""
