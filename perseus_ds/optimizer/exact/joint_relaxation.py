"""The relaxed problem with neighbouring ranks bounded together: its flows prove more.

For each pair of parallel paths (see ``parallel_paths``) the hulls of its four instructions are replaced by one arc from
the meeting where the paths begin to the one where they end, with the joint hull of them all. The instructions
themselves take at least their fastest clocks' times. The flow over the arc goes along both paths.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array, csr_array

from perseus_ds.optimizer.exact.hull import Pieces
from perseus_ds.optimizer.exact.laplacian import Laplacian
from perseus_ds.optimizer.exact.network import Graph, Network
from perseus_ds.optimizer.exact.parallel_paths import PathPairs, find_path_pairs, matching
from perseus_ds.optimizer.exact.relaxation import InteriorPoint, Relaxation

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


class JointRelaxation:
    """Finds flows for those pairs of paths, no two of the same rank, whose joint hulls lie highest."""

    @classmethod
    def of(cls, relaxation: Relaxation) -> JointRelaxation | None:
        """Return the joint relaxation; None where no neighbouring ranks run parallel paths."""
        pairs = find_path_pairs(relaxation.network.problem)
        return cls(relaxation, pairs) if pairs else None

    def __init__(self, relaxation: Relaxation, pairs: list[PathPairs]) -> None:
        self._relaxation = relaxation
        chosen = matching([each.rank for each in pairs], [each.gain_j for each in pairs])
        self._pairs = pairs = [pairs[number] for number in chosen]
        network = relaxation.network
        edge_tail, edge_head = network.problem.edges
        tail, head, least_s, paths = [network.tail], [network.head], [network.least_s], []
        for each in pairs:
            edges = each.edges[0]
            tail.append(network.end_event[edge_tail[edges[:, 0]]])
            head.append(network.start_event[edge_head[edges[:, -1]]])
            least_s.append(np.full(len(edges), each.length_s[0]))
            paths.append([_arcs_along(network, path, edge_head) for path in each.edges])
        tails, heads = np.concatenate(tail), np.concatenate(head)
        order = np.argsort(network.depth[tails], kind="stable")
        self._graph = Graph(tails, heads, np.concatenate(least_s), order)
        self._laplacian = Laplacian(self._graph)
        self._along = self._flow_along(paths)
        self._joined = np.zeros(len(tails), dtype=bool)
        for each in pairs:
            self._joined[each.decisions.ravel()] = True

    def flow_w(self, deadline_s: float) -> Floats:
        """Return a flow over the network's arcs that is optimal for a deadline, shape (arcs,) [W]."""
        pieces = self._pieces(deadline_s)
        solved = InteriorPoint(self._graph, self._laplacian, self._relaxation.unit, pieces, deadline_s=deadline_s).run()
        arcs = len(self._relaxation.network.tail)
        flow_w = np.maximum(solved.flow_w, 0.0)
        result: Floats = flow_w[:arcs] + self._along @ flow_w[arcs:]
        return result

    def _pieces(self, deadline_s: float) -> Pieces:
        alone = self._relaxation.pieces(deadline_s, tilted=False)
        kept = ~self._joined[alone.owner]
        owner, length_s, saving_w = [alone.owner[kept]], [alone.length_s[kept]], [alone.saving_w[kept]]
        first = len(self._relaxation.network.tail)
        for each in self._pairs:
            corners_s, count = np.diff(each.length_s), len(each.decisions)
            owner.append(np.repeat(np.arange(first, first + count), len(corners_s)))
            length_s.append(np.tile(corners_s, count))
            saving_w.append(np.tile(-np.diff(each.cost_j) / corners_s, count))
            first += count
        return Pieces(np.concatenate(owner), np.concatenate(length_s), np.concatenate(saving_w))

    def _flow_along(self, paths: list[list[Indices]]) -> csr_array:
        """Return the matrix that sends half of the flow over each added arc along each of its paths."""
        rows, columns, first = [], [], 0
        for pair in paths:
            for arcs in pair:
                row, step = np.nonzero(arcs >= 0)
                rows.append(arcs[row, step])
                columns.append(first + row)
            first += len(pair[0])
        row, column = np.concatenate(rows), np.concatenate(columns)
        shape = (len(self._relaxation.network.tail), first)
        return coo_array((np.full(len(row), 0.5), (row, column)), shape=shape).tocsr()


def _arcs_along(network: Network, edges: Indices, edge_head: Indices) -> Indices:
    """Return the arcs along paths of the DAG, -1 for none; the node at the end of a path is not part of it.

    Args:
        network: The network.
        edges: Shape (paths, n): the edges of each path in order.
        edge_head: Where the edges of the DAG end.
    """
    return np.concatenate([network.edge_arc[edges], network.node_arc[edge_head[edges[:, :-1]]]], axis=1)
