#!/usr/bin/env bash
# Makes an authority and a certificate for each of the two hosts, which they show each other.
#
#   ./make_certificates.sh PREFILL_HOST DECODE_HOST      names or addresses, as the other host reaches them
#
# Writes tls/ca.key, which stays where it was made, and tls/prefill and tls/decode, one for each host. Run again, it keeps the
# authority and makes new certificates.
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,7p' "$0"; exit 2; }
cd "$(dirname "$0")"
umask 077
mkdir -p tls

subject_alternative_name() {
  if [[ $1 =~ ^[0-9.]+$|: ]]; then echo "IP:$1"; else echo "DNS:$1"; fi
}

[ -e tls/ca.key ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 3650 \
  -keyout tls/ca.key -out tls/ca.pem -subj "/CN=Baton two hosts" \
  -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign"

certificate() {  # role, host: a certificate to serve and to call with, also valid for the container's name and loopback
  mkdir -p "tls/$1"
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -subj "/CN=$1" \
    -keyout "tls/$1/key.pem" -out "tls/$1/request.pem"
  openssl x509 -req -in "tls/$1/request.pem" -CA tls/ca.pem -CAkey tls/ca.key -CAcreateserial -days 825 \
    -out "tls/$1/cert.pem" -extfile <(
      echo "basicConstraints=critical,CA:FALSE"
      echo "keyUsage=critical,digitalSignature"
      echo "extendedKeyUsage=serverAuth,clientAuth"
      echo "subjectAltName=$(subject_alternative_name "$2"),DNS:$1,DNS:localhost,IP:127.0.0.1"
    )
  rm "tls/$1/request.pem"
  cp tls/ca.pem "tls/$1/ca.pem"
}
certificate prefill "$1"
certificate decode "$2"
echo "made tls/prefill and tls/decode; the containers' user has to read them: chown -R 10001 tls/prefill tls/decode"
