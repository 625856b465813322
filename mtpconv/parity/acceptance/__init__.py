"""Does the draft head still draft? Draft and verify with a checkpoint's own MTP."""
