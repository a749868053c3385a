#!/bin/sh
# Becomes HAProxy with these arguments, unless others can use its key: the rule of every other program of the server
# (core/private_files.py), which the gateway's image does not have.
#
#   sh gateway.sh FOLDER haproxy -W -db -f ...
folder=$1
shift
for place in "$folder/server.key" "$folder/gateway.token"; do
    if [ -d "$place" ]; then
        echo "$place: is a folder, not a file (Docker makes one for a file that was missing when a container started)." >&2
        echo "Remove it: rmdir $place. Then bring the file back, or, if it is lost: fedcross deploy federation" >&2
        exit 2
    fi
done
if [ ! -s "$folder/gateway.token" ]; then
    echo "$folder/gateway.token: missing. Make it, and restart the SuperLink: fedcross deploy federation" >&2
    exit 2
fi
for place in "$folder" "$folder/server.key" "$folder/gateway.token"; do
    if [ -n "$(find "$place" -maxdepth 0 -perm /077)" ]; then
        wanted=600
        [ -d "$place" ] && wanted=700
        echo "$place: mode $(stat -c %a "$place"), so others on this machine can use it. Close it: chmod $wanted $place" >&2
        echo "If it may have been read: a new server.key needs a new authority (docs/deploy.md), gateway.token does not." >&2
        exit 2
    fi
done
FEDCROSS_GATEWAY=$(cat "$folder/gateway.token")
case $FEDCROSS_GATEWAY in
*[!A-Za-z0-9._~+/=-]*)
    echo "$folder/gateway.token: no token, it has letters, digits and ._~+/=- only. Remove it and make a new one," >&2
    echo "then restart the SuperLink: fedcross deploy federation" >&2
    exit 2
    ;;
esac
export FEDCROSS_GATEWAY
exec "$@"
