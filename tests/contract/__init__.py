"""Contract tests for every optimizer: with `attach`, it equals the paper's literal algorithm."""
