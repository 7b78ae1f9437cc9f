"""Network addresses that a download may contact: public ones, and private networks that the user allows."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

from aiohttp.abc import AbstractResolver
from aiohttp.resolver import ThreadedResolver

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class PrivateAddressError(OSError):
    """A host has only private addresses."""


def may_contact(text: str, allowed: Sequence[Network]) -> bool:
    """Return whether an address is public or in an allowed network.

    An IPv6 address that stands for an IPv4 address is judged by that address.
    """
    address = _ipv4_inside(ipaddress.ip_address(text.partition("%")[0]))
    if any(address in network for network in allowed):
        return True
    return address.is_global and not address.is_multicast


def _ipv4_inside(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for; other addresses as they are."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.teredo is not None:
        _, client = address.teredo
        return client
    return address.ipv4_mapped or address.sixtofour or address


def is_literal(host: str) -> bool:
    """Return whether a host is an address, so that no resolver is needed."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


class PublicResolver(AbstractResolver):
    """Resolver that returns only addresses that may be contacted; a connection uses what it returns."""

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed = allowed
        self._inner = ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[Any]:
        """Return addresses of a host. Raises PrivateAddressError if none may be contacted."""
        found = await self._inner.resolve(host, port, family)
        public = [entry for entry in found if may_contact(entry["host"], self._allowed)]
        if not public:
            raise PrivateAddressError(f"{host} has private addresses only")
        return public

    async def close(self) -> None:
        """Release nothing."""
        await self._inner.close()
