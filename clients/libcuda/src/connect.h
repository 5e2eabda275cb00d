/* SPDX-License-Identifier: MIT */
#pragma once

/*
 * A connection to a socket of the daemon's (SOCK_SEQPACKET), closed by exec; -1: nobody is there. `path` has room
 * in an address. Sending, and connecting where nobody accepts, has a deadline; receiving one too unless it is 0.
 */
int mpsd_connect(const char *path, int send_s, int receive_s);
