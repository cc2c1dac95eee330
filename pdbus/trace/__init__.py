"""The life of one request, hop by hop (`pdbus trace`): `hops` orders the events that the parts recorded,
`waterfall` draws them."""
