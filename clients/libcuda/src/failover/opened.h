/* SPDX-License-Identifier: MIT */
/* The calls of a second copy of the driver that make descriptors. */
#pragma once

/* For a copy's slot, in place of `symbol`; NULL: that makes none. `number` is 1 or more: not the first copy's. */
void *mpsd_opened_call(const char *symbol, unsigned int number);
