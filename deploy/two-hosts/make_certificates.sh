#!/usr/bin/env bash
# Makes an authority and a certificate for each of the two hosts, which they show each other.
#
#   ./make_certificates.sh PREFILL_HOST DECODE_HOST      names or addresses, as the other host reaches them
#
# Writes tls/ca.key, which stays where it was made, and tls/prefill and tls/decode, one for each host. Run again, it keeps the
# authority and makes new certificates. Nothing of tls is changed before all is made.
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,7p' "$0"; exit 2; }
cd "$(dirname "$0")"
umask 077

mkdir -p tls
for path in tls tls/prefill tls/decode; do
  [ ! -e "$path" ] || [ -w "$path" ] || { echo "$PWD/$path: not writable; run this with sudo" >&2; exit 1; }
done
[ ! -e tls/ca.key ] || [ -r tls/ca.key ] || { echo "$PWD/tls/ca.key: not readable; run this with sudo" >&2; exit 1; }

new=$(mktemp -d tls/new.XXXXXX)
trap 'rm -rf "$new"' EXIT

if [ -e tls/ca.key ]; then
  cp tls/ca.key tls/ca.pem "$new"
else
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 3650 \
    -keyout "$new/ca.key" -out "$new/ca.pem" -subj "/CN=Baton two hosts" \
    -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi

subject_alternative_name() {  # an IPv6 address may stand in brackets, as it does before a port
  local host=${1#[}
  host=${host%]}
  if [[ $host =~ ^[0-9.]+$|: ]]; then echo "IP:$host"; else echo "DNS:$host"; fi
}

certificate() {  # role, host: a certificate to serve and to call with, also valid for the container's name and loopback
  mkdir "$new/$1"
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -subj "/CN=$1" \
    -keyout "$new/$1/key.pem" -out "$new/$1.request"
  openssl x509 -req -in "$new/$1.request" -CA "$new/ca.pem" -CAkey "$new/ca.key" -set_serial "0x$(openssl rand -hex 16)" \
    -days 825 -out "$new/$1/cert.pem" -extfile <(
      echo "basicConstraints=critical,CA:FALSE"
      echo "keyUsage=critical,digitalSignature"
      echo "extendedKeyUsage=serverAuth,clientAuth"
      echo "subjectAltName=$(subject_alternative_name "$2"),DNS:$1,DNS:localhost,IP:127.0.0.1"
    )
  openssl verify -CAfile "$new/ca.pem" "$new/$1/cert.pem"
  cp "$new/ca.pem" "$new/$1"
}
certificate prefill "$1"
certificate decode "$2"

# All is made: from here on nothing but renames, which are not broken off. The directories stay, for containers have them
# mounted, and so does their owner, whose the new files become: who is not the owner needs sudo.
trap '' HUP INT TERM
[ -e tls/ca.key ] || mv "$new/ca.pem" "$new/ca.key" tls
for role in prefill decode; do
  mkdir -p "tls/$role"
  [ "$(id -u)" != 0 ] || chown --reference="tls/$role" "$new/$role"/*
  mv -f "$new/$role"/* "tls/$role"
done
echo "made tls/prefill and tls/decode, each for its host, where the containers' user, 10001, has to own it"
