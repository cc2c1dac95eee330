"""How to test an engine against a live cluster: pdbus brings the fixture `pdbus_cluster` into pytest."""

import pytest

from pdbus import RequestFailed


def test_a_request_goes_through_both_ranks(pdbus_cluster):
    cluster = pdbus_cluster(prefill=2, decode=2, decode_method="total_requests")
    with cluster.client() as client:
        stream = client.generate_tokens([5, 6, 7], max_tokens=8)
        assert len(stream.tokens()) == 8
        assert stream.result.prefill.instance == "prefill-0"
        assert {rank.state for rank in client.status().ranks} == {"ready"}


def test_a_dead_rank_costs_no_request(pdbus_cluster):
    cluster = pdbus_cluster(prefill=1, decode=2, ranks_per_process=1)
    with cluster.client() as client:
        cluster.kill("decode-0/1")
        for _ in range(4):
            assert len(client.generate_tokens([5, 6, 7], max_tokens=3).tokens()) == 3
        with pytest.raises(RequestFailed) as caught:
            client.generate_tokens([5, 6, 7], routed_dp_rank=1).tokens()
        assert caught.value.code == "rank_unavailable"
