"""Random changes to graphs, and what launches of those graphs do to four buffers of four words.

resolve() turns drawn numbers into actions that are valid one after the other, and computes the final words.
Nodes that use one buffer depend on one another in the order in which they were added, so every order that
the driver may choose has the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

BUFFERS, WORDS, MOST_NODES = 4, 4, 30
Drawn = tuple[str, int, int, int, int]
Action = list[Any]
Operation = tuple[str, int, int, int]
"""A kind, a buffer, another buffer, and a value."""
READ_TWO = ("copy", "memcpy")
KINDS = ("add", "fill", "set", "copy", "memcpy", "word", "empty", "record", "wait", "child")
CAPTURED = ("add", "fill", "set", "copy", "memcpy", "word")
VALUED = ("add", "fill", "set", "word")
STEPS = ("node",) * 5 + (
    "edge",
    "part",
    "drop",
    "become",
    "capture",
    "clone",
    "exec",
    "exec",
    "change",
    "update",
)
STEPS += ("launch",) * 4 + ("sync",)


def apply(operation: Operation, words: list[list[int]]) -> None:
    kind, one, two, value = operation
    if kind == "add":
        words[one] = [word + value for word in words[one]]
    elif kind == "fill":
        words[one] = [value] * WORDS
    elif kind == "set":
        words[one][:3] = [value] * 3
    elif kind in READ_TWO:
        words[one] = list(words[two])
    elif kind == "word":
        words[one][0] = value


def touched(operation: Operation) -> set[int]:
    kind, one, two, _ = operation
    if kind in ("empty", "record", "wait"):
        return set()
    return {one, two} if kind in READ_TWO else {one}


@dataclass
class Node:
    number: int
    operation: Operation
    child: list[Operation] | None = None
    after: set[int] = field(default_factory=set)
    extra: set[int] = field(default_factory=set)
    """Dependencies that no buffer needs."""

    def buffers(self) -> set[int]:
        return set(range(BUFFERS)) if self.child is not None else touched(self.operation)

    def run(self, words: list[list[int]]) -> None:
        for operation in self.child if self.child is not None else [self.operation]:
            apply(operation, words)


@dataclass
class Graph:
    number: int
    nodes: list[Node] = field(default_factory=list)
    shape: int = 0
    """Changes with nodes and edges."""

    def before(self, buffers: set[int]) -> set[int]:
        """Return the numbers of the last nodes that use these buffers."""
        found = set()
        for buffer in buffers:
            for node in reversed(self.nodes):
                if buffer in node.buffers():
                    found.add(node.number)
                    break
        return found

    def operations(self) -> list[Operation]:
        return [
            each
            for node in self.nodes
            for each in (node.child if node.child is not None else [node.operation])
        ]


@dataclass
class Executable:
    number: int
    graph: int
    shape: int
    nodes: list[Node]


class Resolver:
    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.graphs: list[Graph] = []
        self.executables: list[Executable] = []
        self.words = [[0] * WORDS for _ in range(BUFFERS)]
        self._count = 0
        self._shapes = 0
        self._new_graph()

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _changed(self, graph: Graph) -> None:
        self._shapes += 1
        graph.shape = self._shapes

    def _new_graph(self) -> None:
        graph = Graph(self._number())
        self._changed(graph)
        self.graphs.append(graph)
        self.actions.append(["graph", graph.number])

    def step(self, drawn: Drawn) -> None:
        what, which, one, two, value = drawn
        graph = self.graphs[which % len(self.graphs)]
        method: Callable[[Graph, int, int, int], None] = getattr(self, what)
        method(graph, one, two, value)

    def _operation(self, kinds: Sequence[str], one: int, two: int, value: int) -> Operation:
        return kinds[value % len(kinds)], one % BUFFERS, two % BUFFERS, value

    def node(self, graph: Graph, one: int, two: int, value: int) -> None:
        operation = self._operation(KINDS, one, two, value)
        others = [other for other in self.graphs if other is not graph and other.nodes]
        if len(graph.nodes) == MOST_NODES or (operation[0] == "child" and not others):
            return
        child = others[one % len(others)] if operation[0] == "child" else None
        node = Node(self._number(), operation, None if child is None else child.operations())
        node.after = graph.before(node.buffers())
        if graph.nodes:
            other = graph.nodes[two % len(graph.nodes)].number
            node.extra = {other} - node.after
            node.after |= node.extra
        graph.nodes.append(node)
        self._changed(graph)
        which = [child.number] if child else list(operation[1:])
        self.actions.append(["node", graph.number, node.number, operation[0], which, sorted(node.after)])

    def edge(self, graph: Graph, one: int, two: int, value: int) -> None:
        if len(graph.nodes) < 2:
            return
        first, then = sorted((one % len(graph.nodes), two % len(graph.nodes)))
        before, node = graph.nodes[first], graph.nodes[then]
        if first == then or before.number in node.after:
            return
        node.after.add(before.number)
        node.extra.add(before.number)
        self._changed(graph)
        self.actions.append(["edge", graph.number, before.number, node.number])

    def part(self, graph: Graph, one: int, two: int, value: int) -> None:
        edges = [(other, node) for node in graph.nodes for other in sorted(node.extra)]
        if not edges:
            return
        other, node = edges[one % len(edges)]
        node.after.remove(other)
        node.extra.remove(other)
        self._changed(graph)
        self.actions.append(["part", graph.number, other, node.number])

    def drop(self, graph: Graph, one: int, two: int, value: int) -> None:
        if not graph.nodes:
            return
        gone = graph.nodes[one % len(graph.nodes)]
        for node in graph.nodes:
            if gone.number not in node.after:
                continue
            for other in sorted(gone.after - node.after):
                self.actions.append(["edge", graph.number, other, node.number])
            node.after = (node.after | gone.after) - {gone.number}
            node.extra &= node.after
        graph.nodes.remove(gone)
        self._changed(graph)
        self.actions.append(["drop", graph.number, gone.number])

    def become(self, graph: Graph, one: int, two: int, value: int) -> None:
        nodes = [node for node in graph.nodes if node.operation[0] in VALUED]
        if not nodes:
            return
        node = nodes[one % len(nodes)]
        node.operation = (*node.operation[:3], value)
        self.actions.append(
            ["become", graph.number, node.number, node.operation[0], list(node.operation[1:])]
        )

    def capture(self, graph: Graph, one: int, two: int, value: int) -> None:
        operations = [
            self._operation(CAPTURED, one + i, two + i * value, value + i) for i in range(1 + value % 3)
        ]
        if len(graph.nodes) + len(operations) > MOST_NODES:
            return
        buffers = set().union(*map(touched, operations))
        after = graph.before(buffers)
        self.actions.append(["begin", graph.number, sorted(after)])
        made = []
        for operation in operations:
            node = Node(self._number(), operation, after={made[-1].number} if made else after)
            self.actions.append(["captured", operation[0], list(operation[1:])])
            made.append(node)
        graph.nodes += made
        self._changed(graph)
        self.actions.append(["end", graph.number, [node.number for node in made]])

    def clone(self, graph: Graph, one: int, two: int, value: int) -> None:
        if len(self.graphs) == 3:
            return
        numbers = {node.number: self._number() for node in graph.nodes}
        copy = Graph(self._number())
        for node in graph.nodes:
            after, extra = ({numbers[each] for each in of} for of in (node.after, node.extra))
            copy.nodes.append(Node(numbers[node.number], node.operation, node.child, after, extra))
        self._changed(copy)
        self.graphs.append(copy)
        self.actions.append(["clone", graph.number, copy.number, sorted(numbers.items())])

    def exec(self, graph: Graph, one: int, two: int, value: int) -> None:
        nodes = [Node(node.number, node.operation, node.child) for node in graph.nodes]
        made = Executable(self._number(), graph.number, graph.shape, nodes)
        self.executables.append(made)
        self.actions.append(["exec", made.number, graph.number])

    def change(self, graph: Graph, one: int, two: int, value: int) -> None:
        alive = {node.number for graph in self.graphs for node in graph.nodes}
        found = [
            (made, node)
            for made in self.executables
            for node in made.nodes
            if node.operation[0] in VALUED and node.number in alive
        ]
        if not found:
            return
        made, node = found[one % len(found)]
        node.operation = (*node.operation[:3], value)
        given = [made.number, node.number, node.operation[0], list(node.operation[1:])]
        self.actions.append(["change", *given])

    def update(self, graph: Graph, one: int, two: int, value: int) -> None:
        found = [
            made for made in self.executables if made.graph == graph.number and made.shape == graph.shape
        ]
        if not found:
            return
        made = found[one % len(found)]
        made.nodes = [Node(node.number, node.operation, node.child) for node in graph.nodes]
        self.actions.append(["update", made.number, graph.number])

    def launch(self, graph: Graph, one: int, two: int, value: int) -> None:
        if not self.executables:
            return
        made = self.executables[one % len(self.executables)]
        for node in made.nodes:
            node.run(self.words)
        self.actions.append(["launch", made.number])

    def sync(self, graph: Graph, one: int, two: int, value: int) -> None:
        self.actions.append(["sync"])


def resolve(drawn: Sequence[Drawn]) -> tuple[list[Action], list[int]]:
    """Return the actions, and the words of all buffers after them."""
    resolver = Resolver()
    for step in drawn:
        resolver.step(step)
    return resolver.actions, [word % 2**32 for words in resolver.words for word in words]
