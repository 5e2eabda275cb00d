/* SPDX-License-Identifier: MIT */
/* One line at the end of a program whose GPU work was lost. */
#pragma once

#include <cuda.h>

/* Print the line when this process ends with a status other than 0 after mpsd_lost_note(). A forked child prints none. */
void mpsd_lost_watch(void);

/* The program gets this error. Where it means that its context is lost, no move comes for it any more. */
void mpsd_lost_note(CUresult result);
