"""What looks at torch while it works: backwards, passes of distributed autograd, loaders, modules, steps.

Each stands at a place of torch's own that everybody comes by, and lets who listens hear of it.
"""
