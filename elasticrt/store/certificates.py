"""Certificates, checked before they are used."""

from __future__ import annotations

import ssl

from elasticrt.errors import ConfigError


def check(context: ssl.SSLContext, where: str, ca: str | None, certificate: str | None, key: str | None) -> None:
    """Check that these PEM files can be used. Raises ConfigError about the options `where`.

    Args:
        context: reads them.
        where: the options that name them.
        ca: certificates of the authorities to trust.
        certificate: this side's own; `key`: its key.
    """
    try:
        if ca is not None:
            context.load_verify_locations(ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key, password="")  # Else OpenSSL asks the terminal for one.
    except OSError as error:
        expected, remedy = "PEM files, the key that of the certificate", "Check the paths and what the files hold"
        raise ConfigError("unusable certificates", where, got=error, expected=expected, remedy=remedy) from error
