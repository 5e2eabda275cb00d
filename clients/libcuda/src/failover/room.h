/* SPDX-License-Identifier: MIT */
/* Memory for a program whose allocation fails, from where it lies for a fail-over alone (failoverwire.h: SHORT, GIVE). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "failoverwire.h"

/* From the program's threads, and those of gift.c: the standby goes. False: there is none, or it did not go in time. */
bool mpsd_room_ask(const char *why);

/* Another program gives something, for this allocation. False: nobody does. */
struct mpsd_shortage;
bool mpsd_room_ask_others(struct mpsd_shortage *shortage);

/* From the thread of line.c */

/* The daemon takes SHORT; and may not be there any more. */
void mpsd_room_may_ask(bool is);

/* NULL: nobody wants the standby's memory; else why. Then is_given(): it went, or there was none. */
const char *mpsd_room_wanted(void);
void mpsd_room_is_given(bool went);

/* That this program asks others, and that it has given something. False: the connection has ended. */
bool mpsd_room_tell(int line);

/* GIVE, ROOM. */
void mpsd_room_told(const struct mpsd_failover_message *order);

/* The process ends: nobody asks, and nothing is given any more. Waits for what is being given, a moment. */
void mpsd_room_at_end(void);
void mpsd_room_child(void);

/* gift.c: what another program needs. told(): a GAVE that is to be said; false: there is none. */
void mpsd_gift_begin(enum mpsd_failover_spared spared);
bool mpsd_gift_told(struct mpsd_failover_message *message);
void mpsd_gift_at_end(void);
void mpsd_gift_child(void);
