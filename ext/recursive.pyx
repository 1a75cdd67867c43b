# A recursive estimator that tells shape from speed: least squares of the relative error over the work of an iteration,
# old iterations forgotten exponentially, and over it a level, the logarithm of how fast the engine is just now.
#
# What keeps it stable. The sums of least squares are kept in information form, which forgetting can only shrink: nothing
# winds up while the work does not vary. The coefficients are found by a few sweeps of coordinate descent from where they
# are, none below zero, so that what the recent work does not determine stays as it was. An observation moves the model
# no further than a bounded distance from what was expected of it, so that one stalled iteration is no trend; several
# surprises in a row, all of one sign, are one, and the bound on the level doubles with each of them.

from libc.math cimport INFINITY, NAN, exp, fabs, log, pow, sqrt
from libc.stdint cimport INT64_MAX, int64_t
from libc.string cimport memcpy

cimport numpy as cnp

from fpmsdk._ext.regression cimport RegressionStore, StoreView

from fpmsdk._ext.sampler import check_shapes, wrong_state

cnp.import_array()

# The axes of `features` that a store learns from.
WORK_AXES = ("prefill_tokens", "prefill_attention_pairs", "decode_requests", "decode_kv_tokens")

CLOCK_FIELDS = ("observations", "surprises in a row, below zero when faster than expected")

cdef enum:
    OBSERVATIONS = 0
    SURPRISES

cdef enum:
    SWEEPS = 4

# No latency is below the first (regression-and-learned.md section 1.8) or, thirty thousand years, above the second.
cdef double FLOOR_MS = 1e-6
cdef double CEILING_MS = 1e15
# An axis with less information than this has been forgotten.
cdef double FORGOTTEN = 1e-100
# No coefficient of a latency below the ceiling comes near it; what a saved state asks for stays finite.
cdef double LARGEST_MS = 1e30
cdef double LARGEST_LEVEL = 100.0
# Counting stops far from where numbers wrap.
cdef int64_t MOST_COUNTED = 1 << 62
# The bound on outliers is at least this over the number of observations: at first nothing is known. The shape learns
# from unbounded surprises for the first so many.
cdef double STARTUP_BOUND = 3.0
cdef int64_t STARTUP = 20
# So many surprises of one sign in a row may be chance.
cdef int64_t PATIENCE = 3
# Weight of the newest error in the mean of recent errors.
cdef double ERROR_GAIN = 0.02


cdef double work_ms(const double* coefficient_ms, const double* work) noexcept nogil:
    cdef double latency_ms = coefficient_ms[0]
    cdef int i
    for i in range(NUM_WORK_AXES):
        latency_ms += coefficient_ms[i + 1] * work[i]
    return max(latency_ms, FLOOR_MS)


cdef class RecursiveView(StoreView):
    """What a recursive store has learned."""

    cdef double predict(self, const double* features) noexcept nogil:
        if not self.ready:
            return NAN
        return work_ms(self.coefficient_ms, features + self.first_axis) * exp(self.level)

    def details(self):
        """`drift`, latency of late over that of the long run; `mean_error`, relative, of recent answers."""
        return {"drift": exp(self.level - self.long_run_level), "mean_error": self.recent_error} if self.ready else {}

    cdef object expected_error(self, const double* features):
        # The mean error of recent answers, widened by how far the work reaches beyond what was seen of late. What is
        # seen has on average the leverage of one coefficient in as many observations as there are; that of other work
        # is the more of it, however many observations there were: they do not tell how the work goes on there.
        cdef double leverage = leverage_of(self, features + self.first_axis)
        cdef double beyond = leverage * self.remembered / NUM_COEFFICIENTS
        return min(self.recent_error * sqrt(max(1.0 + leverage, beyond)), 1.0), leverage <= 1.0


cdef double leverage_of(RecursiveView view, const double* work) noexcept nogil:
    # x' R^-1 x in units of one observation, infinite where the work uses an axis that nothing is known of.
    cdef double factor[NUM_COEFFICIENTS * NUM_COEFFICIENTS]
    cdef double scaled[NUM_COEFFICIENTS]
    cdef double scale[NUM_COEFFICIENTS]
    cdef double latency_ms = work_ms(view.coefficient_ms, work)
    cdef double total, leverage = 0.0
    cdef int i, j, k
    for i in range(NUM_COEFFICIENTS):
        total = view.information[i * NUM_COEFFICIENTS + i]
        scale[i] = 1.0 / sqrt(total) if total > FORGOTTEN else 0.0
        scaled[i] = (work[i - 1] if i > 0 else 1.0) / latency_ms
        if scale[i] == 0.0 and scaled[i] != 0.0:
            return INFINITY
        scaled[i] *= scale[i]
    # Cholesky of the correlations and forward substitution in one pass; collinear work keeps a finite, small pivot.
    for i in range(NUM_COEFFICIENTS):
        for j in range(i + 1):
            total = view.information[i * NUM_COEFFICIENTS + j] * scale[i] * scale[j]
            if i == j:
                total += 1.0 if scale[i] == 0.0 else 1e-9
            for k in range(j):
                total -= factor[i * NUM_COEFFICIENTS + k] * factor[j * NUM_COEFFICIENTS + k]
            factor[i * NUM_COEFFICIENTS + j] = (
                sqrt(max(total, 1e-10)) if i == j else total / factor[j * NUM_COEFFICIENTS + j]
            )
        for k in range(i):
            scaled[i] -= factor[i * NUM_COEFFICIENTS + k] * scaled[k]
        scaled[i] /= factor[i * NUM_COEFFICIENTS + i]
        leverage += scaled[i] * scaled[i]
    return leverage


cdef class RecursiveStore(RegressionStore):
    """One workload's recursive fit.

    Parameters
    ----------
    layout : StateLayout
    settings : mapping
        ``forgetting``, ``outlier_bound``, ``level_gain`` of `estimator_config.fpm_regression.fit.recursive`.
    min_observations : int
    first_axis : int
        Place of the first of `WORK_AXES` among the projected features.
    """

    def __init__(self, layout, settings, min_observations, int first_axis):
        self.layout = layout
        self.forgetting = settings["forgetting"]
        self.outlier_bound = settings["outlier_bound"]
        self.level_gain = settings["level_gain"]
        self.min_observations = min(min_observations, INT64_MAX)
        self.first_axis = first_axis
        self.arrays = layout.allocate()
        self.bind()

    cdef int bind(self) except -1:
        self.coefficient_ms = <double*>cnp.PyArray_DATA(self.arrays["coefficient_ms"])
        self.level = <double*>cnp.PyArray_DATA(self.arrays["level"])
        self.long_run_level = <double*>cnp.PyArray_DATA(self.arrays["long_run_level"])
        self.mean_error = <double*>cnp.PyArray_DATA(self.arrays["mean_error"])
        self.information = <double*>cnp.PyArray_DATA(self.arrays["information"])
        self.moment_ms = <double*>cnp.PyArray_DATA(self.arrays["moment_ms"])
        self.clock = <int64_t*>cnp.PyArray_DATA(self.arrays["clock"])
        return 0

    cdef StoreView view(self):
        cdef RecursiveView view = RecursiveView.__new__(RecursiveView)
        view.first_axis = self.first_axis
        memcpy(view.coefficient_ms, self.coefficient_ms, sizeof(view.coefficient_ms))
        memcpy(view.information, self.information, sizeof(view.information))
        view.level = self.level[0]
        view.long_run_level = self.long_run_level[0]
        view.recent_error = self.mean_error[0]
        view.remembered = (1.0 - pow(self.forgetting, <double>self.clock[OBSERVATIONS])) / (1.0 - self.forgetting)
        view.ready = self.clock[OBSERVATIONS] >= self.min_observations
        view.retained_observations = self.clock[OBSERVATIONS]
        return view

    cdef double predict(self, const double* projected) noexcept nogil:
        if self.clock[OBSERVATIONS] < self.min_observations:
            return NAN
        return work_ms(self.coefficient_ms, projected + self.first_axis) * exp(self.level[0])

    cdef void learn(self, const double* projected, double target_ms) noexcept nogil:
        cdef const double* work = projected + self.first_axis
        cdef double relative[NUM_COEFFICIENTS]
        cdef double observed_ms = max(min(target_ms, CEILING_MS), FLOOR_MS)
        cdef double unit_ms = observed_ms, seen = 1.0
        cdef double shape_ms, surprise
        cdef int i, j
        if self.clock[OBSERVATIONS] > 0:
            # Least squares sees the engine at the speed of its coefficients; the level takes the rest.
            shape_ms = work_ms(self.coefficient_ms, work)
            surprise = self.follow(log(observed_ms / shape_ms) - self.level[0])
            if self.clock[OBSERVATIONS] < STARTUP:
                unit_ms = shape_ms * exp(surprise)
            else:
                # Relative to what is expected, not to what is seen: surprises that cancel out then change nothing.
                unit_ms = shape_ms
                seen = 1.0 + surprise
        self.clock[OBSERVATIONS] = min(self.clock[OBSERVATIONS] + 1, MOST_COUNTED)
        for i in range(NUM_COEFFICIENTS):
            relative[i] = (work[i - 1] if i > 0 else 1.0) / unit_ms
        for i in range(NUM_COEFFICIENTS):
            for j in range(NUM_COEFFICIENTS):
                self.information[i * NUM_COEFFICIENTS + j] = (
                    self.forgetting * self.information[i * NUM_COEFFICIENTS + j] + relative[i] * relative[j]
                )
            self.moment_ms[i] = self.forgetting * self.moment_ms[i] + relative[i] * seen
        self.settle_coefficients()

    cdef double follow(self, double surprise) noexcept nogil:
        # Judge the answer, move the level, and return what of the surprise the shape may learn from.
        cdef int64_t known = self.clock[OBSERVATIONS], sign = 1 if surprise > 0.0 else -1
        cdef double error = min(fabs(exp(min(-surprise, 1.0)) - 1.0), 1.0)  # |answer - observed| / observed
        cdef double bound = max(self.outlier_bound, STARTUP_BOUND / known)
        cdef double bounded
        self.mean_error[0] += max(ERROR_GAIN, 1.0 / known) * (error - self.mean_error[0])
        bounded = max(min(surprise, bound), -bound)
        if bounded == surprise:
            self.clock[SURPRISES] = 0
        else:
            self.clock[SURPRISES] = sign * min(max(sign * self.clock[SURPRISES], 0) + 1, MOST_COUNTED)
            for _ in range(min(self.clock[SURPRISES] * sign - PATIENCE, 10)):
                bound *= 2.0
        self.level[0] += self.level_gain * max(min(surprise, bound), -bound)
        self.level[0] = max(min(self.level[0], LARGEST_LEVEL), -LARGEST_LEVEL)
        self.long_run_level[0] += max(1.0 - self.forgetting, 1.0 / known) * (self.level[0] - self.long_run_level[0])
        return bounded if known < STARTUP else max(min(surprise, self.outlier_bound), -self.outlier_bound)

    cdef void settle_coefficients(self) noexcept nogil:
        # First a common factor: where the work does not vary, a change of speed is one of all coefficients alike.
        cdef double gradient, own, along = 0.0, across = 0.0
        cdef int sweep, i, j
        for i in range(NUM_COEFFICIENTS):
            along += self.coefficient_ms[i] * self.moment_ms[i]
            for j in range(NUM_COEFFICIENTS):
                across += (
                    self.coefficient_ms[i] * self.information[i * NUM_COEFFICIENTS + j] * self.coefficient_ms[j]
                )
        if across > FORGOTTEN and along > 0.0:
            for i in range(NUM_COEFFICIENTS):
                self.coefficient_ms[i] = min(self.coefficient_ms[i] * (along / across), LARGEST_MS)
        for sweep in range(SWEEPS):
            for i in range(NUM_COEFFICIENTS):
                own = self.information[i * NUM_COEFFICIENTS + i]
                if own <= FORGOTTEN:
                    continue
                gradient = self.moment_ms[i]
                for j in range(NUM_COEFFICIENTS):
                    gradient -= self.information[i * NUM_COEFFICIENTS + j] * self.coefficient_ms[j]
                self.coefficient_ms[i] = min(max(self.coefficient_ms[i] + gradient / own, 0.0), LARGEST_MS)

    def saved(self):
        """The arrays. The next observation changes them: encode them before."""
        return self.arrays

    def restore(self, dict saved):
        """Take over saved arrays of the declared types; they belong to the store from then on.

        Raises
        ------
        StateSnapshotError: they are not what tuning leaves behind; the store is unusable then.
        """
        check_shapes(saved, self.arrays)
        information = saved["information"]
        if not (information == information.T).all():
            raise wrong_state("information", "a symmetric matrix", information.tolist())
        learned = saved["clock"][OBSERVATIONS] > 0
        if learned != bool(information[0, 0] > 0.0):
            raise wrong_state("information", "some exactly when something was observed", information[0, 0])
        if not learned and (any(saved[name].any() for name in saved)):
            raise wrong_state("clock", "observations where something was learned", saved["clock"].tolist())
        self.arrays = saved
        self.bind()
