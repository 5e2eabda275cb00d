/* SPDX-License-Identifier: MIT */
#pragma once

#include <stdbool.h>

/*
 * Show the daemon the ledger and hear how many guard zones there may be; what is there already gets its
 * zones at once. For the channel's thread, on a connection that is open. False: the connection is of no use.
 */
bool mpsd_grant_ask(void);
