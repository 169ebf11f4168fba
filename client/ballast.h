/* Ballast for every language: a plain C interface to one rank's session with its job on a service.
 *
 *   ballast_session* session;
 *   if (ballast_open(&options, &session) != BALLAST_OK) return fail(ballast_message());
 *   ballast_upload_weights(session, weights, count);    if ballast_info says awaiting_weights
 *   ballast_read_weights(session);
 *   for (;;) {
 *     ballast_begin_step(session, &step);
 *     ballast_push_gradients(session, 0, gradients, count, 1);    one backward: one micro-step
 *     while ((status = ballast_seal_and_vote(session, 1, &ballot, &decision)) ==
 *            BALLAST_DEADLINE_EXCEEDED) ...
 *     while ((status = ballast_receive_weights(session)) == BALLAST_DEADLINE_EXCEEDED) ...
 *   }
 *   ballast_close(session);
 *
 * Every function that can fail returns a status; ballast_message then gives one line that says what
 * to do, for the calling thread, until its next call. No exception and no signal leaves the
 * library.
 *
 * Threads: one session's calls come one at a time, from any thread; ballast_gradient_memory,
 * ballast_weights_memory, ballast_push and the calls for single gradients may run beside the
 * others. Sessions are independent. After fork() the child may not use the parent's sessions, nor
 * open its own: every call returns BALLAST_FAILED_PRECONDITION there, and ballast_close only
 * forgets the session.
 *
 * Waits: sealing, voting and the calls that wait for a step's weights return
 * BALLAST_DEADLINE_EXCEEDED after wait_seconds at most, and are then called again to wait on; so a
 * program can look at signals meanwhile. ballast_open and ballast_read_weights wait for other ranks,
 * and for first weights, as long as join_timeout_seconds.
 *
 * Structures begin with their size, which the caller sets to sizeof. A library that is newer than
 * the program reads what the program knows, and takes zero for the rest. Strings are UTF-8, end
 * with a zero byte, and are copied. ballast/client/session.h documents the same session in C++, with
 * the meaning of every error.
 */
#ifndef BALLAST_CLIENT_BALLAST_H_
#define BALLAST_CLIENT_BALLAST_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BALLAST_API_VERSION 7

/* The numbers are gRPC's. */
typedef enum ballast_status {
  BALLAST_OK = 0,
  BALLAST_CANCELLED = 1,
  BALLAST_UNKNOWN = 2,
  BALLAST_INVALID_ARGUMENT = 3,
  BALLAST_DEADLINE_EXCEEDED = 4,
  BALLAST_NOT_FOUND = 5,
  BALLAST_ALREADY_EXISTS = 6,
  BALLAST_PERMISSION_DENIED = 7,
  BALLAST_RESOURCE_EXHAUSTED = 8,
  BALLAST_FAILED_PRECONDITION = 9,
  BALLAST_ABORTED = 10,
  BALLAST_OUT_OF_RANGE = 11,
  BALLAST_UNIMPLEMENTED = 12,
  BALLAST_INTERNAL = 13,
  BALLAST_UNAVAILABLE = 14,
  BALLAST_DATA_LOSS = 15,
  BALLAST_UNAUTHENTICATED = 16
} ballast_status;

typedef enum ballast_dtype {
  BALLAST_FLOAT32 = 0,
  BALLAST_BFLOAT16 = 1,
  BALLAST_FLOAT16 = 2
} ballast_dtype;

/* What happens to a parameter that no rank gave a gradient in a step. */
typedef enum ballast_unused_policy {
  BALLAST_UNUSED_ERROR = 0,
  BALLAST_UNUSED_SKIP = 1, /* Its state and update count stay, as in torch. */
  BALLAST_UNUSED_ZERO = 2
} ballast_unused_policy;

typedef enum ballast_update_mode {
  BALLAST_UPDATE_WAIT = 0,
  BALLAST_UPDATE_SPECULATE = 1
} ballast_update_mode;

/* What becomes of a step that all ranks have begun and that cannot be kept, because a rank was
 * replaced or the step was aborted. */
typedef enum ballast_on_abort {
  BALLAST_ON_ABORT_REDO = 0, /* Sessions end with ABORTED; every rank does the step again. */
  BALLAST_ON_ABORT_SKIP = 1  /* It ends as a skipped step on all ranks, whose sessions go on. */
} ballast_on_abort;

/* Whether a gradient of a chunk is its last of the step. */
typedef enum ballast_last {
  BALLAST_MORE = 0,     /* It may not be. */
  BALLAST_FINAL = 1,    /* It is; the service begins its work before the seal. */
  BALLAST_MAY_GUESS = 2 /* It may be: the same without the promise. Others undo that work. */
} ballast_last;

/* What the service keeps of each element, in fp32. */
typedef enum ballast_plane {
  BALLAST_MASTER = 1,
  BALLAST_EXP_AVG = 2,
  BALLAST_EXP_AVG_SQ = 3,
  BALLAST_MAX_EXP_AVG_SQ = 4 /* With amsgrad. */
} ballast_plane;

/* Of a param group, named as in torch.optim.AdamW. */
typedef struct ballast_hyper_parameters {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  int32_t decoupled_weight_decay; /* 1: AdamW. 0: Adam, weight_decay is L2 regularisation. */
  int32_t bias_correction;
  int32_t amsgrad; /* Fixed when the job is created. */
  int32_t maximize;
} ballast_hyper_parameters;

/* What torch.optim.AdamW and torch.optim.Adam have where nothing is said:
 *   ballast_hyper_parameters h = BALLAST_ADAMW_DEFAULTS;    then h.lr = 3e-4; */
#define BALLAST_ADAMW_DEFAULTS \
  { 1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 1, 0, 0 }
#define BALLAST_ADAM_DEFAULTS \
  { 1e-3, 0.9, 0.999, 1e-8, 0, 0, 1, 0, 0 }

typedef struct ballast_group {
  size_t size;
  const char* name; /* Unique in the job, not empty. */
  ballast_hyper_parameters hyper_parameters;
  int32_t wire_dtype;   /* ballast_dtype of gradients on their way to the service. */
  int32_t return_dtype; /* ballast_dtype of weights on their way back. */
} ballast_group;

/* A placement: this dimension of the mesh does not cut the parameter. */
#define BALLAST_REPLICATE (-1)

typedef struct ballast_parameter {
  size_t size;
  const char* name;     /* Unique in the job, not empty. */
  const int64_t* shape; /* dimensions extents. A zero among them: a parameter of no elements. */
  int32_t dimensions;   /* 0: a scalar. */
  int32_t group;        /* Index into the groups. */
  int32_t frozen;       /* 1: never updated, and its gradient and weight pointers are not read. */
  /* With a mesh, one for each of its dimensions: the dimension of the parameter that is cut, by
   * the rule of torch.chunk, or BALLAST_REPLICATE. Null without a mesh; may be null for a frozen
   * parameter. */
  const int32_t* placements;
} ballast_parameter;

/* As in torch.distributed.device_mesh. */
typedef struct ballast_mesh_dim {
  size_t size;
  const char* name; /* Unique in the mesh, not empty. */
  int32_t ranks;
} ballast_mesh_dim;

/* Without a mesh, the flat space of each group is cut into buckets, and each bucket among the
 * ranks, in order; pointers are to whole parameters. With a mesh (torch's DTensor), each rank
 * has a shard of every parameter, a box of it; all pointers are to this rank's shard, its
 * elements row-major as in DTensor.to_local(). Of replicas of a shard the first one's rank is
 * the owner; the pointers of the others are not read or written. */
typedef struct ballast_job {
  size_t size;
  const char* name; /* [A-Za-z0-9._-]{1,128}, not beginning with '.'. */
  const ballast_group* groups;
  size_t group_count;
  const ballast_parameter* parameters;
  size_t parameter_count;
  int32_t world_size;
  int64_t bucket_elements;      /* 0: one bucket for each group. With a mesh, 0. */
  int64_t chunk_elements;       /* A multiple of 256, at most 262144; 0: 262144. */
  int32_t unused_policy;        /* ballast_unused_policy */
  int32_t update_mode;          /* ballast_update_mode */
  uint32_t max_micro_steps;     /* 0: any number. */
  const ballast_mesh_dim* mesh; /* Of the ranks in row-major order. Null: no mesh. */
  size_t mesh_dimensions;
  int32_t on_abort;      /* ballast_on_abort */
  int32_t keep_previous; /* 1: ballast_undo can be called; costs memory for one more version. */
} ballast_job;

typedef struct ballast_options {
  size_t size;
  const char* service; /* "host:port" or "unix:/path". */
  const ballast_job* job;
  int32_t rank;
  const char* process_id; /* Null: made from host, process and random bits. */
  const char* job_uid;    /* Null: any job of this name, or a new one. */
  int32_t rejoin; /* 1: this process had the rank before, and does not take it from another. */
  int32_t never_share_memory;
  double join_timeout_seconds;      /* 0: 60. */
  double reconnect_timeout_seconds; /* 0: 60. */
  double wait_seconds; /* The longest single wait for other ranks or for the service; 0: 600. */
  /* parameter_count pointers, of which those of frozen parameters, and of those of which this
   * rank owns no element, may be null: where the weights of each parameter are written, its
   * elements in the group's return dtype, row-major, as ballast_read_weights and
   * ballast_receive_weights get them. Only elements that this rank owns are written. The
   * library's threads write between the decision and the return of ballast_receive_weights. Null:
   * read them from ballast_weights_memory. */
  void* const* weights;
  /* Files in the form of PEM; null: what BALLAST_TLS_CA, BALLAST_TLS_CERT, BALLAST_TLS_KEY and
   * BALLAST_TOKEN_FILE say, or none. With tls_ca, the authority of the service's certificate,
   * "host:port" speaks TLS. tls_cert and tls_key, or a token, which goes over TLS and unix sockets
   * only, say who this is. */
  const char* tls_ca;
  const char* tls_cert;
  const char* tls_key;
  const char* token_file;
  /* 1: the session is only for ballast_upload_weights, ballast_save and ballast_load: one that is
   * about to load a checkpoint is not told that there is one. */
  int32_t takes_no_steps;
  /* Not null: the job goes on from the state of the job of the same name and this uid, with other
   * parameters. Those of the same name and shape keep weights, moments and update counts;
   * ballast_upload_weights sends the others. All ranks say the same, with job_uid null. Once all
   * weights are there the job takes the other one's place, in one act; until then both are there.
   * NOT_FOUND, here or from ballast_read_weights: that job has gone on, or is gone; derive again. */
  const char* derive_from_uid;
  /* Not null: the state comes from this checkpoint, as of ballast_load. With derive_from_uid null no
   * job may have the name. */
  const char* derive_from_checkpoint;
} ballast_options;

typedef struct ballast_session ballast_session;

typedef struct ballast_info {
  size_t size;
  uint64_t committed_step;
  uint64_t generation_epoch;
  uint64_t generation;      /* Its count, within the epoch. */
  int32_t awaiting_weights; /* 1: the job has no weights yet; upload them. */
  int32_t shares_memory;    /* 1: with the service, by memory of this host. */
  int32_t last_step_applied;
  const char* job_uid; /* Valid until ballast_close. */
} ballast_info;

/* Elements [begin, begin + elements) of the flat space of `group`; with a mesh, of what the rank
 * owns of it. */
typedef struct ballast_chunk {
  int32_t index;
  int32_t group;
  int64_t begin;
  int64_t elements;
} ballast_chunk;

/* Consecutive elements of a parameter, or, with a mesh, of this rank's shard of it. */
typedef struct ballast_piece {
  size_t parameter;
  int64_t offset;       /* Of the first one, in the parameter or shard. */
  int64_t chunk_offset; /* The same, in the chunk. */
  int64_t elements;
} ballast_piece;

typedef struct ballast_step {
  size_t size;
  double loss_scale;      /* 0: 1. Gradients are this many times too large. */
  const double* divisors; /* One for each group: what gradients were summed over. Null: all 1. */
  /* One for each group, in force from this step on; amsgrad is not read. Null: as they are. */
  const ballast_hyper_parameters* hyper_parameters;
  const void* trainer_state;  /* Kept with the step once it is committed. */
  size_t trainer_state_bytes; /* At most 4096. */
  /* What the ranks will vote of clipping, as far as it is known; only speed depends on it. */
  double expected_max_norm;           /* 0: none. */
  const double* expected_multipliers; /* One for each group. Null: all 1. */
} ballast_step;

/* What becomes of a step that all ranks have sealed, as this rank wants it; all ranks want the
 * same. Zeros: it is applied with what it began with, and not clipped. */
typedef struct ballast_ballot {
  size_t size;
  int32_t abandon; /* 1: the step is skipped. */
  /* Clipping, by one of the two: the global norm, as torch.nn.utils.clip_grad_norm_ (0: not); or
   * what the gradient of each group, unscaled and divided, is multiplied by (null: 1). */
  double max_norm;
  const double* multipliers; /* One for each group, positive. */
  /* One for each group, in place of those that the step began with; amsgrad is not read. Null: as
   * they are. */
  const ballast_hyper_parameters* hyper_parameters;
  const void* trainer_state;  /* In place of that of ballast_begin_step. Null: that one. */
  size_t trainer_state_bytes; /* At most 4096. */
} ballast_ballot;

/* Of the unscaled, divided gradient, of all ranks. */
typedef struct ballast_norm {
  size_t size;
  uint64_t step;
  double norm; /* Over all groups. May be infinite or NaN. */
  /* 1: an element is not finite, and ballast_message names the first one. */
  int32_t non_finite;
  uint64_t unused_parameters; /* How many no rank gave a gradient; ballast_unused has the first. */
} ballast_norm;

typedef struct ballast_decision {
  size_t size;
  uint64_t step;
  int32_t applied; /* 0: skipped; nothing has changed, and ballast_message says why. */
  double norm;     /* Of the unscaled, divided gradient over all groups. */
  double clip_coefficient;
} ballast_decision;

/* A plane of a whole parameter in numbers, computed on the service. */
typedef struct ballast_summary {
  size_t size;
  int32_t plane; /* ballast_plane */
  double norm;   /* L2; like the next three, of the elements that are finite. */
  double mean;   /* 0 if there are none, as the next two. */
  double min;
  double max;
  int64_t zeros;
  int64_t non_finite;
  /* Counts of |x| by decade: [i] has those of 10^(i-12) <= |x| < 10^(i-11). Smaller ones that are
   * not 0 count in the first, larger ones in the last. */
  int64_t magnitudes[16];
} ballast_summary;

/* BALLAST_API_VERSION of the library. */
int32_t ballast_api_version(void);
/* Of the calling thread's last call that did not return BALLAST_OK. Never null. */
const char* ballast_message(void);

/* Creates or joins the job, takes the rank, opens its stream. INVALID_ARGUMENT, FAILED_PRECONDITION
 * (another description, the first difference is named; or another process has taken the rank and
 * rejoin was given), NOT_FOUND (job_uid), RESOURCE_EXHAUSTED, UNAVAILABLE, DEADLINE_EXCEEDED. */
int32_t ballast_open(const ballast_options* options, ballast_session** session);
/* Ends the session; the job stays. Null is ignored. No other call of the session may be running. */
void ballast_close(ballast_session* session);

int32_t ballast_get_info(const ballast_session* session, ballast_info* info);
/* The trainer's state of the last committed step: its size, and as much as `capacity` takes. */
int32_t ballast_trainer_state(const ballast_session* session, void* out, size_t capacity,
                              size_t* bytes);
/* A rank's chunks in order: their number, and as many as `capacity` takes. With a mesh a session
 * knows those of its own rank alone; others have none here. */
int32_t ballast_chunks(const ballast_session* session, int32_t rank, ballast_chunk* out,
                       size_t capacity, size_t* count);
/* What one of this rank's chunks holds, in order: the number of pieces, and as many as
 * `capacity` takes. What is in none of them is padding: zeros in a gradient. */
int32_t ballast_pieces(const ballast_session* session, int32_t chunk, ballast_piece* out,
                       size_t capacity, size_t* count);
/* Where a parameter begins in its group's flat space (-1: frozen, or there is a mesh), and the
 * elements of that space. */
int32_t ballast_place(const ballast_session* session, size_t parameter, int64_t* offset,
                      int64_t* flat_elements);

/* The first weights: `parameters` are parameter_count pointers to fp32, row-major; of frozen
 * ones, null, and of those of which this rank owns no element. Only elements that this rank owns
 * are read. */
int32_t ballast_upload_weights(ballast_session* session, const float* const* parameters,
                               size_t count);

/* What another optimizer has made of a model, that a new job goes on from: pointers as those of
 * ballast_upload_weights. Null among the moments: zeros. */
typedef struct ballast_first_state {
  size_t size;
  uint64_t step; /* That the job begins at; at least 1. */
  /* How often each parameter has been updated: at most `step`; 0 of frozen ones. */
  const int64_t* update_counts;
  const float* const* weights;
  const float* const* exp_avg;
  const float* const* exp_avg_sq;
  const float* const* max_exp_avg_sq; /* Of groups with amsgrad; null if there are none. */
} ballast_first_state;

/* The first weights with their moments, by all ranks with the same step and update counts; `count`
 * is parameter_count. FAILED_PRECONDITION: other ranks have given another state. UNIMPLEMENTED: the
 * service is older, and takes weights alone. */
int32_t ballast_upload_state(ballast_session* session, const ballast_first_state* state,
                             size_t count);

/* Writes elements [offset, offset + elements) of a plane (a ballast_plane) of what this rank has of
 * a parameter, row-major in fp32, to `out`; returns 0, or anything else to end the upload. */
typedef int32_t (*ballast_values)(void* context, size_t parameter, int32_t plane, int64_t offset,
                                  int64_t elements, float* out);

/* Both of the above, for values that are not all in memory at once: `values` is called on this
 * thread, by part of a chunk in the order of declaration, and again for what a broken connection
 * has lost. step 0: weights alone, and update_counts is not read. CANCELLED: `values` has ended
 * it. */
int32_t ballast_upload_by(ballast_session* session, uint64_t step, const int64_t* update_counts,
                          size_t count, ballast_values values, void* context);

/* Planes of parameters that are written between two steps, in place of what the last one has left:
 * by all ranks, with the same structure. Step and generation stay; that step cannot be undone any
 * more. */
typedef struct ballast_state_write {
  size_t size;
  const size_t* parameters;     /* Their indices, ascending; of trainable ones. */
  size_t count;                 /* Of them, at least 1. */
  const int32_t* planes;        /* Of ballast_plane, ascending. */
  size_t plane_count;           /* 0: the update counts alone. */
  const int64_t* update_counts; /* Of each, at most the committed step; null: they stay. */
  double timeout_seconds;       /* The longest wait for the other ranks' parts; 0: 600. */
} ballast_state_write;

/* `values` as of ballast_upload_by, of those planes and parameters. Returns when all ranks have
 * brought their parts and the whole is the job's state. FAILED_PRECONDITION: another rank writes
 * something else, or has begun the next step. INVALID_ARGUMENT: a value is not finite, or a square
 * below zero. RESOURCE_EXHAUSTED: the service has no room for the values beside the state.
 * DEADLINE_EXCEEDED, after timeout_seconds, names the ranks that have brought nothing. CANCELLED:
 * `values` has ended it. */
int32_t ballast_write_state(ballast_session* session, const ballast_state_write* write,
                            ballast_values values, void* context);
/* The committed weights of this rank, to options.weights or ballast_weights_memory. */
int32_t ballast_read_weights(ballast_session* session);

/* Begins step committed_step + 1. */
int32_t ballast_begin_step(ballast_session* session, const ballast_step* step);
/* Gives a micro-step as a whole: count (parameter_count) pointers to gradients in the groups'
 * wire dtypes, row-major; null: the parameter got none, or this rank owns no element of it. Reads
 * the elements that this rank owns, and no more once it has returned; then ends the micro-step.
 * final: a ballast_last, whether it is the step's last one. DEADLINE_EXCEEDED: some may have left;
 * call again with the same gradients to go on. INVALID_ARGUMENT: with others, or the micro-step was
 * ended. FAILED_PRECONDITION: another thread has discarded it meanwhile. */
int32_t ballast_push_gradients(ballast_session* session, uint32_t micro_step,
                               const void* const* gradients, size_t count, int32_t final);

/* The same parameter by parameter, as a backward pass comes to them: each chunk leaves when all its
 * parameters are given. From any thread. `final` is the same in all calls of a micro-step.
 * INVALID_ARGUMENT: the parameter is frozen, it was given in this micro-step, or another micro-step
 * is open. DEADLINE_EXCEEDED: call again to go on. gradient null: it was written to its places. */
int32_t ballast_give_gradient(ballast_session* session, uint32_t micro_step, size_t parameter,
                              const void* gradient, int32_t final);
/* Ends the micro-step. The parameters that were not given have no gradient in it. Waits for those
 * that have places and are not written yet. Errors as of ballast_push_gradients. */
int32_t ballast_end_gradients(ballast_session* session, uint32_t micro_step, int32_t final);

/* Elements [offset, offset + elements) of a parameter's gradient belong at `data`. */
typedef struct ballast_gradient_place {
  void* data;
  int64_t offset;
  int64_t elements;
} ballast_gradient_place;

/* Where a gradient that is elsewhere, as on a GPU, is copied to by the caller: the number of
 * places, and as many as `capacity` takes. Then ballast_give_gradient without a gradient says that
 * it is there. `attempt` rises when a step begins and when what was given is discarded. */
int32_t ballast_gradient_places(ballast_session* session, uint32_t micro_step, size_t parameter,
                                ballast_gradient_place* out, size_t capacity, size_t* count,
                                uint64_t* attempt);

/* The same for a caller that may neither wait nor fail: ballast_gradient_written is a CUhostFn, for
 * cuLaunchHostFunc behind the copy, and `ticket` a ballast_gradient_ticket that stays until it has
 * been called. It does nothing if the attempt is over. An error is that of ballast_end_gradients.
 * All copies have ended before ballast_discard, since the next attempt has the same places, and
 * before ballast_close. */
typedef struct ballast_gradient_ticket {
  ballast_session* session;
  size_t parameter;
  uint64_t attempt;
  int32_t final;
} ballast_gradient_ticket;
void ballast_gradient_written(void* ticket);

/* The same chunk by chunk. Where a chunk's gradient may be written so that ballast_push copies
 * nothing; `data` is null if no memory is shared. */
int32_t ballast_gradient_memory(ballast_session* session, int32_t chunk, void** data,
                                size_t* bytes);
int32_t ballast_weights_memory(ballast_session* session, int32_t chunk, const void** data,
                               size_t* bytes);
/* The sum over ranks of a chunk's gradient in micro-steps [begin, end). `released`, which may be
 * null, is called exactly once, from any thread, when `data` may be written again. data null:
 * the chunk has no gradient. */
int32_t ballast_push(ballast_session* session, int32_t chunk, uint32_t micro_step_begin,
                     uint32_t micro_step_end, int32_t final, const void* data,
                     void (*released)(void* context), void* context);
/* used: one byte for each parameter, not 0 where this rank gave it a gradient; null: all. */
int32_t ballast_end_micro_step(ballast_session* session, uint32_t micro_step, const uint8_t* used,
                               size_t count);

/* For people who look at the job, in its history, its metrics and on the page: a named number of the
 * step that is sealed, or voted on, next. At most 16 names of 1 to 64 letters, digits, '.', '_', '/'
 * and '-'; any value, NaN too. Nothing is decided by it, and of ranks that report any the lowest
 * counts. Since version 7, as the next. */
int32_t ballast_report_number(ballast_session* session, const char* name, double value);
/* Where this rank's time went from its last seal, or its start, to the next one: forward, backward and
 * whatever else it did; waiting for collectives among ranks; giving gradients to the service; waiting
 * for the decision and the weights. Shown of the rank that computed longest. */
int32_t ballast_report_seconds(ballast_session* session, double compute, double reduce, double send,
                               double wait);
/* Nothing more comes for this step from this rank; waits for all ranks, and returns the norm:
 * nothing is decided. group_norms, which may be null, takes one for each group. FAILED_PRECONDITION:
 * the step is not whole, and open; DEADLINE_EXCEEDED: call again to wait on; ABORTED: close, open
 * again, redo the step. */
int32_t ballast_seal(ballast_session* session, uint32_t micro_steps, ballast_norm* norm,
                     double* group_norms, size_t group_count);
/* After ballast_seal; waits for the votes of all ranks. ballot null: zeros. FAILED_PRECONDITION: the
 * votes differ, ballast_message has the first difference, and all ranks vote again; or a rank has
 * discarded the attempt. DEADLINE_EXCEEDED: call again to wait on. */
int32_t ballast_vote(ballast_session* session, const ballast_ballot* ballot,
                     ballast_decision* decision);
/* The parameters, by index, that no rank gave a gradient in the step whose norm or decision was told
 * last: how many are known, which is the first 64 of them at most, and as many as `capacity` takes. */
int32_t ballast_unused(const ballast_session* session, size_t* out, size_t capacity, size_t* count);
/* Both at once, without a look at the norm and without its round trip. */
int32_t ballast_seal_and_vote(ballast_session* session, uint32_t micro_steps,
                              const ballast_ballot* ballot, ballast_decision* decision);
/* Takes back what this rank has given in its attempt at the step; ballast_begin_step begins the
 * next attempt, which may have other settings. Every rank has to discard as often, each when it
 * likes, before any may seal: until then ballast_seal returns FAILED_PRECONDITION on the others.
 * Also before ballast_begin_step, and after ballast_seal, until there is a decision.
 * FAILED_PRECONDITION: the step is decided, receive its weights; DEADLINE_EXCEEDED: call again to
 * wait on. */
int32_t ballast_discard(ballast_session* session);
/* Returns when this rank's weights of the decided step are in place. */
int32_t ballast_receive_weights(ballast_session* session);
/* Before that, if the caller likes: returns when the weights of these parameters, by index, are in
 * place, while others may still come, so that a forward pass can begin with the first layers. They
 * are not written again in this step, which ballast_receive_weights still ends. At once if the step
 * was skipped. FAILED_PRECONDITION: no step is decided; DEADLINE_EXCEEDED: call again to wait on.
 * Since version 5. */
int32_t ballast_await_weights(ballast_session* session, const size_t* parameters, size_t count);

/* A plane of a whole parameter at the committed step, whatever part of it this rank owns:
 * `elements` is the parameter's number of them. update_count: how often it has been updated.
 * INVALID_ARGUMENT: frozen, or no such plane. DEADLINE_EXCEEDED: the answer took
 * reconnect_timeout_seconds; while the service cannot be reached it is asked again, for as long. */
int32_t ballast_read_state(const ballast_session* session, size_t parameter, int32_t plane,
                           float* out, int64_t elements, uint64_t* step, int64_t* update_count);

/* Each plane that a parameter has, in numbers and in the order of ballast_plane, whatever part of it
 * this rank owns: how many they are, and as many as `capacity` takes; out[0].size is that of each. A
 * frozen parameter has none. step, update_count and the time it takes are as in ballast_read_state,
 * and training goes on meanwhile. INVALID_ARGUMENT: there is no such parameter. */
int32_t ballast_summarise(const ballast_session* session, size_t parameter, ballast_summary* out,
                          size_t capacity, size_t* count, uint64_t* step, int64_t* update_count);

/* A name under the service's --checkpoint-dir, or a directory on its host. A save makes a new checkpoint there and
 * replaces none; a load takes the newest good one, or the one that is named ("gpt/step-1000.2"), and ends the sessions
 * of all ranks, this one included. */
int32_t ballast_save(ballast_session* session, const char* directory);
int32_t ballast_load(ballast_session* session, const char* directory);

/* Closes the job, of all ranks, which forgets its state and gives its memory back: ballast_save it first. The sessions of
 * all ranks end; close each with ballast_close. Takes an operator of the job. */
int32_t ballast_close_job(ballast_session* session);

/* Undoes the last committed step, exactly, of a job with keep_previous, and ends the sessions of all ranks, this one
 * included; opened again they are at the step before. undone_step may be null. FAILED_PRECONDITION: some rank has begun
 * the next step, or there is nothing to undo: one step alone can be, and none of before a load. */
int32_t ballast_undo(ballast_session* session, uint64_t* undone_step);

#ifdef __cplusplus
}
#endif

#endif /* BALLAST_CLIENT_BALLAST_H_ */
