// SPDX-License-Identifier: MIT
/*
 * Launches of kernels. Most find all done already that is to be done before they are noted: their parameters lead to
 * what was saved in this epoch. That is seen, and they are noted, under one hold of the lock, so that no epoch ends
 * between. Between two launches a program has used all of the processor's nearer memory for something else: so this way
 * is short, too. All others go through mpsd_submit().
 */
#include "exact/named.h"
#include "exact/params.h"
#include "exact/relay.h"
#include "exact/shapes.h"
#include "exact/submit.h"
#include "exact/undo.h"
#include "exact/validate.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "launches.h"

/*
 * With the lock, and the order or for the relay. False: more is to be done before it is noted; there may be an operation, for
 * that.
 */
static inline bool note(const struct mpsd_launch *given, void **parameters, struct mpsd_op **made, bool is_for_relay)
{
	struct mpsd_lane *lane = mpsd_is_left() ? NULL : mpsd_lane_find(given->stream);
	struct mpsd_op *op = *made;

	if (__builtin_expect(!lane || !mpsd_lane_is_free(lane), 0) || (is_for_relay && !mpsd_relay_takes(lane)))
		return false;
	if (__builtin_expect(!op, 1))
		*made = op = mpsd_params_take_known(given, parameters);
	if (__builtin_expect(!op || !mpsd_params_are_whole(op), 0) || (is_for_relay && !mpsd_shape_is_accepted(op)))
		return false;
	op->lane = lane;
	mpsd_note(op, mpsd_tables()->moves);
	if (is_for_relay)
		mpsd_relay_put(op);
	return true;
}

/* It is the relay's from here on, and the program goes on. False: it is not submitted. */
static inline bool leave_to_relay(const struct mpsd_launch *given, void **parameters, struct mpsd_op **op)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = note(given, parameters, op, true);
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

/* False: it is not submitted. */
static inline bool submit_at_once(const struct mpsd_launch *given, void **parameters, struct mpsd_op **op, CUresult *result)
{
	uint64_t moves = mpsd_tables()->moves;
	struct mpsd_ahead ahead = { NULL, false, 0 };
	bool is;

	if (mpsd_relay_is_awake() && !given->is_cooperative && leave_to_relay(given, parameters, op))
		return true;
	if (__builtin_expect(!mpsd_order_take(moves), 0))
		return false;
	mpsd_launches_fetch_row();
	mpsd_word_take(&mpsd_exact_lock);
	is = note(given, parameters, op, false);
	if (__builtin_expect(is, 1))
		ahead = mpsd_look_ahead((*op)->lane);
	mpsd_word_give(&mpsd_exact_lock);
	if (__builtin_expect(is, 1)) {
		*result = mpsd_finish_marked(*op, mpsd_op_launch(*op), &ahead);
	}
	mpsd_order_give(moves);
	if (__builtin_expect(ahead.until != 0, 0) && *result == CUDA_SUCCESS)
		mpsd_come_near(&ahead);
	if (is && *result == CUDA_SUCCESS)
		mpsd_relay_accepted(given);
	return is;
}

/* Whether that may do, as far as it is known with no lock. */
static inline bool may_be_at_once(const struct mpsd_launch *given, void **extra)
{
	bool is_other = (extra != NULL) | !given->is_brief | !mpsd_exact() | (mpsd_thread.noted_in != 0) | mpsd_named_any |
			mpsd_validates();

	return __builtin_expect(!is_other, 1) && !mpsd_config_records_event(given->config);
}

/* In a capture that cannot be noted: the program goes on, and stays where it is. */
static CUresult launch_unnoted(const struct mpsd_launch *given, void **parameters, void **extra, const char *why)
{
	CUlaunchConfig c = *given->config;
	CUfunction function = mpsd_native(given->function);
	CUresult result;

	if (mpsd_is_in_invalid_capture(given->stream))
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (!mpsd_relay_flush())
		return MPSD_AGAIN;
	mpsd_line_opaque(why);
	c.hStream = mpsd_native(given->stream);
	if (given->is_cooperative)
		result = inner_cuLaunchCooperativeKernel(function, c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX,
							 c.blockDimY, c.blockDimZ, c.sharedMemBytes, c.hStream,
							 parameters);
	else
		result = inner_cuLaunchKernelEx(&c, function, parameters, extra);
	return mpsd_answered(result);
}

/* `op`: NULL, or what was made of it and not noted. */
static MPSD_SELDOM CUresult submit_after(const struct mpsd_launch *given, void **parameters, void **extra,
					 struct mpsd_op *op)
{
	CUresult result = CUDA_SUCCESS;

	if (op)
		mpsd_params_follow_variables(op);
	else
		result = mpsd_params_take(given, parameters, extra, &op);
	if (result == CUDA_SUCCESS)
		return mpsd_submit(op, false);
	if (mpsd_is_loss(result))
		return result;
	/* A function that a move has overtaken is unknown for that alone. */
	if (atomic_load(&mpsd_moves) != mpsd_tables()->moves)
		return MPSD_AGAIN;
	if (!mpsd_exact())
		return launch_unnoted(given, parameters, extra, "a captured kernel with unknown parameters");
	mpsd_exact_fail("a kernel with unknown parameters");
	return MPSD_AGAIN;
}

MPSD_OF_A_LAUNCH static CUresult submit_launch(const struct mpsd_launch *given, void **parameters, void **extra)
{
	struct mpsd_op *op = NULL;
	CUresult result = CUDA_SUCCESS;

	if (__builtin_expect(may_be_at_once(given, extra) && submit_at_once(given, parameters, &op, &result), 1))
		return result;
	return submit_after(given, parameters, extra, op);
}

MPSD_OF_A_LAUNCH CUresult work_cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
			     unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
			     unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
{
	const CUlaunchConfig config = { gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes,
					hStream, NULL, 0 };
	const struct mpsd_launch launch = { f, hStream, &config, true, false, !mpsd_capturing() };

	return submit_launch(&launch, kernelParams, extra);
}

CUresult work_cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
					unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
					unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
					void **kernelParams)
{
	const CUlaunchConfig config = { gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes,
					hStream, NULL, 0 };
	const struct mpsd_launch launch = { f, hStream, &config, false, true, !mpsd_capturing() };

	return submit_launch(&launch, kernelParams, NULL);
}

/* The driver writes there by which name, and kernels go by that of this copy. */
static bool is_updatable(const CUlaunchConfig *config)
{
	for (unsigned int i = 0; config->attrs && i < config->numAttrs; i++)
		if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE &&
		    config->attrs[i].value.deviceUpdatableKernelNode.deviceUpdatable)
			return true;
	return false;
}

MPSD_OF_A_LAUNCH CUresult work_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
	if (config) {
		const struct mpsd_launch launch = { f, config->hStream, config, false, false, !mpsd_capturing() };

		if (!launch.is_brief && is_updatable(config))
			return launch_unnoted(&launch, kernelParams, extra, "a graph node that kernels may change");
		return submit_launch(&launch, kernelParams, extra);
	}
	return inner_cuLaunchKernelEx(config, mpsd_native(f), kernelParams, extra);
}
