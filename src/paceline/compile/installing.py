"""What has to be in place before anything of a replica is compiled; for as long as the process lives."""

from functools import cache

from paceline.compile import in_graph, traced


@cache
def install() -> None:
    """Be there when torch compiles something."""
    from paceline.compile import splitting  # noqa: F401  torch learns the name of its backend

    in_graph.install()
    traced.install()
