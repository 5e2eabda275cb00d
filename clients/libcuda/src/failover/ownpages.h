/* SPDX-License-Identifier: MIT */
/* Pages that a copy of the driver shares with the GPU. */
#pragma once

/*
 * They become the process's own, with what they hold. The copy was left, nobody is inside it, and it gives the GPU nothing
 * any more. On one thread at a time.
 */
void mpsd_pages_keep(unsigned int number);
