"""The causes of errors that stores and obstore report, and how a user can fix them."""

import re

from dali_tf_input.storage.client import library

# Patterns in error messages, the cause to report, and whether it may be temporary.
_CAUSES = (
    (r"NoSuchBucket|ContainerNotFound|bucket does not exist", "there is no bucket {bucket}", False),
    (r"is wrong; expecting '([^']+)'", "the bucket is in region {found}: set AWS_REGION", False),
    (
        r"redirect without LOCATION|Redirect<",
        "the bucket is in another region: set AWS_REGION",
        False,
    ),
    (
        r"RequestTimeTooSkewed|RequestExpired|NotValidYet",
        "this machine's clock is wrong: set it",
        False,
    ),
    (
        r"InvalidCertificate\(\s*(\w+)",
        "the certificate of {host} is not trusted ({found}): set AWS_CA_BUNDLE to a file with its"
        " issuer's certificate",
        False,
    ),
    (r"performing \w+ http://169\.254\.169\.254|metadata\.google", "no credentials{names}", True),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken",
        "the store does not take the credentials ({found}){names}",
        False,
    ),
    (r"status code: 40[13]", "no permission{names}", False),
    (r"status code: 4(?!04|08|29)\d\d [\w ]*", "the store refuses the request ({found})", False),
    (r'"dns error"', "no host {host} is known{names}", True),
    (r"ConnectionRefused", "{host} refuses connections{names}", True),
)


def find_cause(url: str, error: Exception) -> tuple[str, bool]:
    """Returns the cause of an error and whether it may be temporary; omits response bodies."""
    text = str(error)
    scheme, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    prefix = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}.get(scheme.lower())
    names = f": check the environment variables {prefix}*" if prefix else ""
    host = re.search(r"https?://([^/\s]+)", text)
    for pattern, cause, is_temporary in _CAUSES:
        if match := re.search(pattern, text, re.DOTALL):
            fields = {"host": host[1] if host else bucket, "found": match[match.lastindex or 0]}
            return cause.format(bucket=bucket, names=names, **fields), is_temporary
    if isinstance(error, FileNotFoundError):
        return "no such object", False
    words = re.split(r"\n|: <", text, maxsplit=1)[0].rpartition(" - ")[2].strip().rstrip(":")
    return words, isinstance(error, library().exceptions.GenericError | ConnectionError)
