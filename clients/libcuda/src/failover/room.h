/* SPDX-License-Identifier: MIT */
/* Memory for a program whose allocation fails, from where it lies for a fail-over alone (failoverwire.h: SHORT, GIVE). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "failoverwire.h"

/* From the program's threads */

/* Its own standby goes. False: there is none, or it did not go in time. */
bool mpsd_room_ask(void);

/* Another program gives something, for this allocation. False: nobody does. */
struct mpsd_shortage;
bool mpsd_room_ask_others(struct mpsd_shortage *shortage);

/* From the thread of line.c */

/* The daemon takes SHORT; and may not be there any more. */
void mpsd_room_may_ask(bool is);

/* NULL: nobody wants the standby's memory; else who, in words. */
const char *mpsd_room_wanted(void);
void mpsd_room_is_given(void);

/* That this program asks others, and that it has given something. False: the connection has ended. */
bool mpsd_room_tell(int line);

/* GIVE, ROOM. */
void mpsd_room_told(const struct mpsd_failover_message *order);

/* The process ends: nothing is given any more. Waits for what is being given, a moment. */
void mpsd_room_at_end(void);
void mpsd_room_child(void);
