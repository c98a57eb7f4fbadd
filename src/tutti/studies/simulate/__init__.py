"""What a training would take, and learn, on hosts that are not there: a simulation on virtual workers."""
