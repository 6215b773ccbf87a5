"""One contract for every optimizer: attached, it equals the paper's procedure taken literally."""
