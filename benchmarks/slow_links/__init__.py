"""Slow links: network namespaces behind a switch of ours, each link with a rate and a delay that are then measured."""

from slow_links.gauge import Reading as Reading
from slow_links.links import SlowLinks as SlowLinks
from slow_links.links import SlowLinksError as SlowLinksError
