"""Deployment on this machine's CPU: the faster of dense and sparse for every layer.

    pipeline       deploy: compact, fold, choose, fuse, verify and measure
    layer_choice   dense or sparse for each layer: measured, forced or planned
    usage          how a model uses its layers, observed in a run
    rewriting      batch-norm folding and the replacement of layers
    fusion         ReLUs and sums fused into sparse layers
    timing         interleaved timing of several functions
    deploy_report  the result of deploy

Two tracers are needed. `usage` observes a real run and sees every use of a weight or an output.
`fusion` rewrites a forward, which needs its symbolic graph (torch.fx).
"""
