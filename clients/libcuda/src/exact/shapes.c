// SPDX-License-Identifier: MIT
/*
 * Launches of which the driver has accepted one like them: what it refuses a launch for is how its blocks are, and how much of
 * the multiprocessor they take. Of each kernel the last two that were accepted are known.
 */
#include "exact/shapes.h"

#include <string.h>

#include "failover/made.h"

#define NEVER 2u		/* shapes are odd */

/*
 * The driver says of a launch whether there may be such blocks of that kernel; of one with attributes, such a grid. Numbers that
 * are mixed: one in billions is taken for another. 0: a grid that it would refuse.
 */
static uint32_t shape_of(const CUlaunchConfig *config, const CUlaunchAttribute *attributes)
{
	uint64_t mixed = config->blockDimX * 0x9e3779b97f4a7c15ull + config->blockDimY * 0xbf58476d1ce4e5b9ull +
			 config->blockDimZ * 0x94d049bb133111ebull + config->sharedMemBytes * 0xd6e8feb86659fd93ull;
	const char *bytes = (const char *)attributes;

	if (config->gridDimX - 1 > INT32_MAX - 1u || config->gridDimY - 1 > UINT16_MAX - 1u ||
	    config->gridDimZ - 1 > UINT16_MAX - 1u)
		return 0;
	if (__builtin_expect(config->numAttrs != 0, 0)) {
		mixed += config->gridDimX * 0xa0761d6478bd642full + config->gridDimY * 0xe7037ed1a0b428dbull +
			 config->gridDimZ * 0x8ebc6af09c88c6e3ull;
		for (size_t at = 0; at < config->numAttrs * sizeof(*attributes); at += sizeof(uint64_t)) {
			uint64_t word;

			memcpy(&word, bytes + at, sizeof(word));
			mixed = (mixed ^ word) * 0x9e3779b97f4a7c15ull;
		}
	}
	return (uint32_t)(mixed >> 32) | 1;
}

bool mpsd_shape_is_accepted(const struct mpsd_op *op)
{
	const uint32_t *accepted = mpsd_params_accepted(op->launch.function);
	uint32_t shape = shape_of(&op->launch.config, op->launch.attributes);

	return accepted && shape && (accepted[0] == shape || accepted[1] == shape);
}

/* Whether its grids have to be multiples of something that is not in the launch. */
static bool has_clusters(CUfunction function)
{
	int must = 0, width = 0;

	if (mpsd_made_is(function, MPSD_MADE_KERNEL)) {
		CUkernel kernel = mpsd_native((CUkernel)function);
		CUdevice device = mpsd_current_device();

		real_cuKernelGetAttribute(&must, CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET, kernel, device);
		real_cuKernelGetAttribute(&width, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, kernel, device);
	} else {
		real_cuFuncGetAttribute(&must, CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET, mpsd_native(function));
		real_cuFuncGetAttribute(&width, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, mpsd_native(function));
	}
	return must || width;
}

void mpsd_shape_accept(const struct mpsd_launch *given)
{
	uint32_t shape = shape_of(given->config, given->config->attrs), *accepted;
	bool is_first;

	if (!shape || given->is_cooperative)
		return;
	mpsd_word_take(&mpsd_exact_lock);
	accepted = mpsd_params_accepted(given->function);
	is_first = accepted && !accepted[0];
	mpsd_word_give(&mpsd_exact_lock);
	/* By the driver, which may keep the thread. */
	if (is_first && has_clusters(given->function))
		shape = NEVER;
	mpsd_word_take(&mpsd_exact_lock);
	accepted = mpsd_is_left() ? NULL : mpsd_params_accepted(given->function);
	if (accepted && accepted[0] != shape && accepted[0] != NEVER) {
		accepted[1] = accepted[0];
		accepted[0] = shape;
	}
	mpsd_word_give(&mpsd_exact_lock);
}

void mpsd_shapes_forget(CUfunction function)
{
	uint32_t *accepted;

	mpsd_word_take(&mpsd_exact_lock);
	accepted = mpsd_params_accepted(function);
	if (accepted && accepted[0] != NEVER)
		memset(accepted, 0, MPSD_SHAPES * sizeof(*accepted));
	mpsd_word_give(&mpsd_exact_lock);
}
