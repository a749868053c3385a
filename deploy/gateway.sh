#!/bin/sh
# Becomes HAProxy with these arguments, unless others can use its key: the rule of every other program of the server
# (core/private_files.py), which the gateway's image does not have.
#
#   sh gateway.sh FOLDER haproxy -W -db -f ...
folder=$1
shift
for place in "$folder" "$folder/server.key"; do
    if [ -n "$(find "$place" -maxdepth 0 -perm /077)" ]; then
        wanted=600
        [ -d "$place" ] && wanted=700
        echo "$place: mode $(stat -c %a "$place"), so others on this machine can use it. Make new keys if they may have" \
            "been read, else: chmod $wanted $place" >&2
        exit 2
    fi
done
exec "$@"
