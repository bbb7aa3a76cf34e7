"""Keep plans: look up records, write them, agree on them between ranks."""
