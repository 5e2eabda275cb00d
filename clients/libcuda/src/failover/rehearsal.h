/* SPDX-License-Identifier: MIT */
#pragma once

/* For the thread of line.c: the standby's contexts have done, once, as much as a move may ask of them. */
void mpsd_rehearse(void);

/* The same with code alone that has come since. */
void mpsd_rehearse_code(void);
