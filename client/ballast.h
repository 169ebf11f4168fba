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
 * Every function that can fail returns a status. After an error ballast_message returns one line
 * that says what to do, and ballast_reason a word that a program can act on. Both describe the
 * calling thread's last failed call. No exception and no signal leaves the library.
 *
 * Threads: calls of one session come one at a time, from any thread. ballast_gradient_memory and
 * the calls for single gradients may run beside the others. Sessions are independent. After fork()
 * the child must not use the parent's sessions or call a service. There every call returns
 * BALLAST_FAILED_PRECONDITION, and ballast_close only forgets the session.
 *
 * Waits: sealing, voting and the calls that wait for a step's weights return
 * BALLAST_DEADLINE_EXCEEDED after wait_seconds at most. Call them again to continue waiting. So a
 * program can handle signals meanwhile. ballast_open and ballast_read_weights wait up to
 * join_timeout_seconds for other ranks and for first weights.
 *
 * Structures begin with their size, which the caller sets to sizeof. If the library is newer than
 * the program, it reads the fields that the program knows and takes zero for the rest. Strings are
 * UTF-8, end with a zero byte, and are copied. ballast/client/session.h documents the same session
 * in C++, with the meaning of every error.
 */
#ifndef BALLAST_CLIENT_BALLAST_H_
#define BALLAST_CLIENT_BALLAST_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BALLAST_API_VERSION 12

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

/* What happens to a parameter without a gradient from any rank in a step. */
typedef enum ballast_unused_policy {
  BALLAST_UNUSED_ERROR = 0,
  BALLAST_UNUSED_SKIP = 1, /* Its state and update count do not change, as in torch. */
  BALLAST_UNUSED_ZERO = 2
} ballast_unused_policy;

typedef enum ballast_update_mode {
  BALLAST_UPDATE_WAIT = 0,
  BALLAST_UPDATE_SPECULATE = 1
} ballast_update_mode;

/* What happens to a step that all ranks have begun and that is lost, because a rank was replaced
 * or the step was aborted. */
typedef enum ballast_on_abort {
  BALLAST_ON_ABORT_REDO = 0, /* Sessions end with ABORTED; every rank repeats the step. */
  BALLAST_ON_ABORT_SKIP = 1  /* The step is skipped on all ranks, whose sessions go on. */
} ballast_on_abort;

/* Who orthogonalizes the directions of groups with the rule Muon. */
typedef enum ballast_newton_schulz {
  BALLAST_BY_SERVICE = 0, /* In fp32. The same bits on every machine, for any number of ranks. */
  BALLAST_BY_WORKERS = 1  /* The ranks: ballast_read_directions. */
} ballast_newton_schulz;

/* Whether a gradient of a chunk is its last one of the step. */
typedef enum ballast_last {
  BALLAST_MORE = 0,     /* Perhaps not. */
  BALLAST_FINAL = 1,    /* Yes; the service begins its work before the seal. */
  BALLAST_MAY_GUESS = 2 /* Perhaps; the service begins its work, and a further one undoes it. */
} ballast_last;

/* The service's state of each element, in fp32. */
typedef enum ballast_plane {
  BALLAST_MASTER = 1,
  BALLAST_EXP_AVG = 2,
  BALLAST_EXP_AVG_SQ = 3,
  BALLAST_MAX_EXP_AVG_SQ = 4,  /* With amsgrad. */
  BALLAST_MOMENTUM_BUFFER = 5, /* SGD with momentum, Muon. */
  BALLAST_SUM = 6              /* Adagrad. */
} ballast_plane;

/* The formula of an update. */
typedef enum ballast_rule {
  BALLAST_ADAM = 0, /* And AdamW. */
  BALLAST_SGD = 1,
  BALLAST_LION = 2,
  BALLAST_ADAGRAD = 3,
  BALLAST_SIGN_SGD = 4,
  BALLAST_MUON = 5 /* For matrices. */
} ballast_rule;

/* A param group's, named as in torch.optim. A rule reads its own fields; others may hold anything. */
typedef struct ballast_hyper_parameters {
  int32_t rule; /* ballast_rule; fixed when the job is created. */
  double lr;
  double beta1;                     /* Adam, Lion */
  double beta2;                     /* Adam, Lion */
  double eps;                       /* Adam, Adagrad, Muon */
  double weight_decay;              /* L2 for SGD and Adagrad; else decoupled. */
  int32_t decoupled_weight_decay;   /* Adam. 1: AdamW. 0: weight_decay is L2 regularisation. */
  int32_t bias_correction;          /* Adam */
  int32_t amsgrad;                  /* Adam; fixed when the job is created. */
  double momentum;                  /* SGD, Muon. SGD's stays 0, or stays above 0. */
  double dampening;                 /* SGD */
  int32_t nesterov;                 /* SGD, Muon */
  double lr_decay;                  /* Adagrad */
  double initial_accumulator_value; /* Adagrad; fixed when the job is created. */
  int32_t maximize;                 /* Not Muon. */
  int32_t ns_steps; /* Muon: of Newton-Schulz, 0 to 99. The next are its coefficients. */
  double ns_a;
  double ns_b;
  double ns_c;
  /* Muon: the factor of lr. 1: 0.2 * sqrt(max(rows, columns)). 0: sqrt(max(1, rows / columns)). */
  int32_t match_rms_adamw;
} ballast_hyper_parameters;

/* Each rule's defaults, those of torch.optim where it has the rule:
 *   ballast_hyper_parameters h = BALLAST_ADAMW_DEFAULTS;    then h.lr = 3e-4; */
#define BALLAST_ADAMW_DEFAULTS \
  { BALLAST_ADAM, 1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define BALLAST_ADAM_DEFAULTS \
  { BALLAST_ADAM, 1e-3, 0.9, 0.999, 1e-8, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define BALLAST_SGD_DEFAULTS \
  { BALLAST_SGD, 1e-3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define BALLAST_LION_DEFAULTS \
  { BALLAST_LION, 1e-4, 0.9, 0.99, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define BALLAST_ADAGRAD_DEFAULTS \
  { BALLAST_ADAGRAD, 1e-2, 0, 0, 1e-10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define BALLAST_SIGN_SGD_DEFAULTS \
  { BALLAST_SIGN_SGD, 1e-3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define BALLAST_MUON_DEFAULTS                                                                     \
  {                                                                                               \
    BALLAST_MUON, 1e-3, 0, 0, 1e-7, 0.1, 0, 0, 0, 0.95, 0, 1, 0, 0, 0, 5, 3.4445, -4.775, 2.0315, \
        0                                                                                         \
  }

/* How a group's state is stored. A parameter with fewer than two dimensions or fewer than 4096
 * elements is in fp32 in any case. */
typedef enum ballast_state_format {
  BALLAST_STATE_FP32 = 0,
  /* Moments in bf16: Adam with beta1 up to 0.99 and beta2 up to 0.98, Lion with beta2 and SGD with
   * momentum up to 0.99, Adagrad, SignSGD. */
  BALLAST_STATE_BF16 = 1,
  BALLAST_STATE_8BIT = 2 /* Moments in 8 bits; Adam without amsgrad. */
} ballast_state_format;

typedef struct ballast_group {
  size_t size;
  const char* name; /* Unique in the job, not empty. */
  ballast_hyper_parameters hyper_parameters;
  int32_t wire_dtype;   /* ballast_dtype of gradients sent to the service. */
  int32_t return_dtype; /* ballast_dtype of weights sent back. */
  int32_t state;        /* ballast_state_format. */
  /* 1: parameters whose shards cut their groups of 64 elements are in fp32. 0: they are refused. */
  int32_t state_fallback;
} ballast_group;

/* A placement: this dimension of the mesh does not cut the parameter. */
#define BALLAST_REPLICATE (-1)

typedef struct ballast_parameter {
  size_t size;
  const char* name;     /* Unique in the job, not empty. */
  const int64_t* shape; /* `dimensions` extents. If one is zero, the parameter has no elements. */
  int32_t dimensions;   /* 0: a scalar. */
  int32_t group;        /* Index into the groups. */
  int32_t frozen;       /* 1: never updated; its gradient and weight pointers are not read. */
  /* With a mesh, one value for each of its dimensions: the dimension of the parameter that is
   * cut, by the rule of torch.chunk, or BALLAST_REPLICATE. Null without a mesh. May be null for
   * a frozen parameter. */
  const int32_t* placements;
} ballast_parameter;

/* As in torch.distributed.device_mesh. */
typedef struct ballast_mesh_dim {
  size_t size;
  const char* name; /* Unique in the mesh, not empty. */
  int32_t ranks;
} ballast_mesh_dim;

/* Without a mesh the flat space of each group is cut into buckets, and each bucket among the
 * ranks, in order; pointers are to whole parameters. With a mesh (torch's DTensor) each rank has
 * a shard of every parameter, a box of it. All pointers are to this rank's shard, with elements
 * row-major as in DTensor.to_local(). One replica of a shard owns it; the other replicas' pointers
 * are not read or written. */
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
  const ballast_mesh_dim* mesh; /* The ranks in row-major order. Null: no mesh. */
  size_t mesh_dimensions;
  int32_t on_abort;      /* ballast_on_abort */
  int32_t keep_previous; /* 1: allows ballast_undo; costs memory for one more version. */
  /* Addresses of the services that hold the job together, as they reach each other, and
   * world_size values: by rank the index of its home. Each member is some rank's home. The same on
   * all ranks. member_count 0: as ballast_options.service says. Since version 9. */
  const char* const* members;
  size_t member_count;
  const int32_t* homes;
  int32_t newton_schulz; /* ballast_newton_schulz. Since version 12. */
} ballast_job;

typedef struct ballast_options {
  size_t size;
  /* "host:port" or "unix:/path". Or several with commas between, "a:7070,b:7070", which hold the
   * job together. All ranks give the same ones in the same order. Each service gets consecutive
   * ranks in even shares, and a session goes to that of its rank. Calls without a session go to the
   * first. If the job has members: how this rank reaches its home, such as by a unix socket; "": at
   * the member's address. */
  const char* service;
  const ballast_job* job;
  int32_t rank;
  const char* process_id; /* Null: made from host, process and random bits. */
  const char* job_uid;    /* Null: any job of this name, or a new one. */
  int32_t rejoin; /* 1: this process had the rank before, and must not take it from another. */
  int32_t never_share_memory;
  double join_timeout_seconds;      /* 0: 60. */
  double reconnect_timeout_seconds; /* 0: 60. */
  double wait_seconds; /* The longest single wait for other ranks or the service; 0: 600. */
  /* parameter_count pointers: where ballast_read_weights and ballast_receive_weights write the
   * weights of each parameter. Elements have the group's return dtype, row-major. A pointer may
   * be null if the parameter is frozen or this rank owns no element of it. Only elements that
   * this rank owns are written. The library's threads write between the decision and the return
   * of ballast_receive_weights. */
  void* const* weights;
  /* PEM files. If null, the variables BALLAST_TLS_CA, BALLAST_TLS_CERT, BALLAST_TLS_KEY and
   * BALLAST_TOKEN_FILE count, if set. tls_ca is the authority of the service's certificate; with
   * it "host:port" uses TLS. tls_cert and tls_key, or a token, identify this client. A token is
   * sent only over TLS and unix sockets. */
  const char* tls_ca;
  const char* tls_cert;
  const char* tls_key;
  const char* token_file;
  /* 1: the session is only for ballast_upload_weights, ballast_save and ballast_load. It prints
   * no hint about existing checkpoints, because it is about to load one. */
  int32_t takes_no_steps;
  /* Not null: the job continues from the state of the job with the same name and this uid, with
   * other parameters. Parameters of the same name and shape keep weights, moments and update
   * counts; ballast_upload_weights sends the others. All ranks give the same uid, with job_uid
   * null. Once all weights have arrived, the job replaces the other one atomically; until then
   * both exist. NOT_FOUND, here or from ballast_read_weights: that job has changed or is gone;
   * derive again. */
  const char* derive_from_uid;
  /* Not null: the state comes from this checkpoint, as in ballast_load. If derive_from_uid is
   * null, no job may have the name. */
  const char* derive_from_checkpoint;
} ballast_options;

typedef struct ballast_session ballast_session;

typedef struct ballast_info {
  size_t size;
  uint64_t committed_step;
  uint64_t generation_epoch;
  uint64_t generation;      /* The count within the epoch. */
  int32_t awaiting_weights; /* 1: the job has no weights; upload them. */
  int32_t shares_memory;    /* 1: with the service, on the same host. */
  int32_t last_step_applied;
  const char* job_uid; /* Valid until ballast_close. */
  /* Not 0: the directions of this step are to be orthogonalized. If it is so when a session was opened:
   * ballast_read_directions, ballast_give_orthogonal and ballast_receive_weights, before anything else.
   * Then committed_step is the step. Since version 12. */
  uint64_t directions_step;
} ballast_info;

/* Elements [begin, begin + elements) of the flat space of `group`; with a mesh, of the rank's
 * own part of it. */
typedef struct ballast_chunk {
  int32_t index;
  int32_t group;
  int64_t begin;
  int64_t elements;
} ballast_chunk;

/* Consecutive elements of a parameter; with a mesh, of this rank's shard of it. */
typedef struct ballast_piece {
  size_t parameter;
  int64_t offset;       /* The first element's, in the parameter or shard. */
  int64_t chunk_offset; /* The same, in the chunk. */
  int64_t elements;
} ballast_piece;

typedef struct ballast_step {
  size_t size;
  double loss_scale;      /* 0: 1. Gradients are multiplied by this. */
  const double* divisors; /* One for each group: what gradients were summed over. Null: all 1. */
  /* One for each group, from this step on; the rule is the group's, and fixed fields are not read.
   * Null: no change. */
  const ballast_hyper_parameters* hyper_parameters;
  const void* trainer_state;  /* Kept with the step once it is committed. */
  size_t trainer_state_bytes; /* At most 4096. */
  /* The expected clipping in the votes, as far as known; it affects only speed. */
  double expected_max_norm;           /* 0: none. */
  const double* expected_multipliers; /* One for each group. Null: all 1. */
} ballast_step;

/* This rank's decision about a step that all ranks have sealed; it must be the same on all
 * ranks. Zeros: apply the step with its settings, unclipped. */
typedef struct ballast_ballot {
  size_t size;
  int32_t abandon; /* 1: the step is skipped. */
  /* Clipping, by one of the two. max_norm: the global norm, as torch.nn.utils.clip_grad_norm_
   * (0: no clipping). multipliers: factors of each group's unscaled, divided gradient (null: 1). */
  double max_norm;
  const double* multipliers; /* One for each group, positive. */
  /* One for each group, in place of the step's; as in ballast_step. Null: no change. */
  const ballast_hyper_parameters* hyper_parameters;
  const void* trainer_state;  /* In place of ballast_begin_step's. Null: keep that. */
  size_t trainer_state_bytes; /* At most 4096. */
} ballast_ballot;

/* The norm of the unscaled, divided gradient of all ranks. */
typedef struct ballast_norm {
  size_t size;
  uint64_t step;
  double norm; /* Over all groups. May be infinite or NaN. */
  /* 1: an element is not finite; ballast_message names the first one. */
  int32_t non_finite;
  uint64_t unused_parameters; /* The number without a gradient; ballast_unused has the first. */
} ballast_norm;

typedef struct ballast_decision {
  size_t size;
  uint64_t step;
  int32_t applied; /* 0: skipped; nothing has changed, and ballast_message has the reason. */
  double norm;     /* Of the unscaled, divided gradient over all groups. */
  double clip_coefficient;
} ballast_decision;

/* BALLAST_API_VERSION of the library. */
int32_t ballast_api_version(void);
/* About the calling thread's last call that did not return BALLAST_OK. Never null. */
const char* ballast_message(void);
/* The same call's reason: a name of ErrorReason in proto/ballast/v1/jobs.proto, which explains it,
 * such as "RANK_REPLACED"; "" if no particular action is needed. */
const char* ballast_reason(void);

/* Creates or joins the job, takes the rank, opens its stream. Errors: INVALID_ARGUMENT,
 * RESOURCE_EXHAUSTED, UNAVAILABLE, DEADLINE_EXCEEDED; NOT_FOUND (job_uid); FAILED_PRECONDITION
 * if the description differs (with the first difference), or if rejoin is set and another
 * process has taken the rank. */
int32_t ballast_open(const ballast_options* options, ballast_session** session);
/* Ends the session; the job stays. Null is ignored. No other call of the session may be running. */
void ballast_close(ballast_session* session);

int32_t ballast_get_info(const ballast_session* session, ballast_info* info);
/* The trainer's state of the last committed step: its size, and up to `capacity` bytes of it. */
int32_t ballast_trainer_state(const ballast_session* session, void* out, size_t capacity,
                              size_t* bytes);
/* This rank's chunks in order: their number, and up to `capacity` of them. */
int32_t ballast_chunks(const ballast_session* session, ballast_chunk* out, size_t capacity,
                       size_t* count);
/* The pieces of one of this rank's chunks, in order: their number, and up to `capacity` of them.
 * Elements outside all pieces are padding: zeros in a gradient. */
int32_t ballast_pieces(const ballast_session* session, int32_t chunk, ballast_piece* out,
                       size_t capacity, size_t* count);
/* The first weights: `parameters` are parameter_count pointers to fp32, row-major. A pointer is
 * null if the parameter is frozen or this rank owns no element of it. Only elements that this
 * rank owns are read. */
int32_t ballast_upload_weights(ballast_session* session, const float* const* parameters,
                               size_t count);

/* Writes elements [offset, offset + elements) of a plane (a ballast_plane) of this rank's part
 * of a parameter, row-major in fp32, to `out`. Returns 0; another value ends the upload. */
typedef int32_t (*ballast_values)(void* context, size_t parameter, int32_t plane, int64_t offset,
                                  int64_t elements, float* out);

/* The same for values that are not all in memory at once, and optionally with moments: with a
 * step a new job continues from the state of another optimizer. `values` is called on this
 * thread, by part of a chunk in the order of declaration. After a broken connection it is called
 * again for the lost part. step: the step at which the job begins; 0: only weights, and
 * update_counts is not read. update_counts: for each of the `count` (parameter_count) parameters
 * the number of its updates, at most `step`; 0 for frozen ones. All ranks give the same step and
 * counts. CANCELLED: `values` ended the upload. FAILED_PRECONDITION: other ranks gave another
 * state. */
int32_t ballast_upload_by(ballast_session* session, uint64_t step, const int64_t* update_counts,
                          size_t count, ballast_values values, void* context);

/* Planes of parameters to write between two steps. All ranks give the same structure. Step and
 * generation do not change. The last step cannot be undone afterwards. */
typedef struct ballast_state_write {
  size_t size;
  const size_t* parameters;     /* Indices of trainable ones, ascending. */
  size_t count;                 /* Their number, at least 1. */
  const int32_t* planes;        /* ballast_plane values, ascending. */
  size_t plane_count;           /* 0: only the update counts. */
  const int64_t* update_counts; /* One for each, at most the committed step; null: no change. */
  double timeout_seconds;       /* The longest wait for the other ranks' parts; 0: 600. */
} ballast_state_write;

/* `values` is called as in ballast_upload_by, for those planes and parameters. Returns when all
 * ranks' parts have arrived and the write is the job's state. FAILED_PRECONDITION: another rank
 * writes something else, or has begun the next step. INVALID_ARGUMENT: a value is not finite, or
 * one of exp_avg_sq, max_exp_avg_sq or sum is negative. RESOURCE_EXHAUSTED: the values do not fit beside
 * the state. DEADLINE_EXCEEDED, after timeout_seconds: the message names the missing ranks.
 * CANCELLED: `values` ended the write. */
int32_t ballast_write_state(ballast_session* session, const ballast_state_write* write,
                            ballast_values values, void* context);
/* Reads the committed weights of this rank into options.weights. */
int32_t ballast_read_weights(ballast_session* session);

/* Begins step committed_step + 1. */
int32_t ballast_begin_step(ballast_session* session, const ballast_step* step);
/* Gives a whole micro-step and ends it: count (parameter_count) pointers to gradients in the
 * groups' wire dtypes, row-major. Null: the parameter has no gradient, or this rank owns no
 * element of it. Reads the elements that this rank owns, and none after its return. final: a
 * ballast_last, whether this is the step's last micro-step. DEADLINE_EXCEEDED: part may have
 * been sent; call again with the same gradients to continue. INVALID_ARGUMENT: other gradients,
 * or the micro-step has ended. FAILED_PRECONDITION: another thread has discarded it meanwhile. */
int32_t ballast_push_gradients(ballast_session* session, uint32_t micro_step,
                               const void* const* gradients, size_t count, int32_t final);

/* The same parameter by parameter, in the order of a backward pass. A chunk is sent when all its
 * parameters are given. From any thread. `final` is the same in all calls of a micro-step.
 * INVALID_ARGUMENT: the parameter is frozen or already given in this micro-step, or another
 * micro-step is open. DEADLINE_EXCEEDED: call again to continue. gradient null: it has been
 * written to its places. */
int32_t ballast_give_gradient(ballast_session* session, uint32_t micro_step, size_t parameter,
                              const void* gradient, int32_t final);
/* Ends the micro-step. Parameters that were not given have no gradient in it. Waits for
 * gradients that have places and are not written yet. Errors as in ballast_push_gradients. */
int32_t ballast_end_gradients(ballast_session* session, uint32_t micro_step, int32_t final);

/* Elements [offset, offset + elements) of a parameter's gradient belong at `data`. */
typedef struct ballast_gradient_place {
  void* data;
  int64_t offset;
  int64_t elements;
} ballast_gradient_place;

/* Where the caller copies a gradient from elsewhere, for example from a GPU: the number of
 * places, and up to `capacity` of them. After the copy call ballast_give_gradient without a
 * gradient. `attempt` rises when a step begins and when gradients are discarded. */
int32_t ballast_gradient_places(ballast_session* session, uint32_t micro_step, size_t parameter,
                                ballast_gradient_place* out, size_t capacity, size_t* count,
                                uint64_t* attempt);

/* The same for a caller that must not wait or fail. ballast_gradient_written is a CUhostFn, for
 * cuLaunchHostFunc behind the copy. `ticket` is a ballast_gradient_ticket that stays valid until
 * the call. If the attempt is over, the call does nothing. ballast_end_gradients returns an
 * error of it. All copies must end before ballast_discard, because the next attempt has the same
 * places, and before ballast_close. */
typedef struct ballast_gradient_ticket {
  ballast_session* session;
  size_t parameter;
  uint64_t attempt;
  int32_t final;
} ballast_gradient_ticket;
void ballast_gradient_written(void* ticket);

/* The memory that the service shares for a chunk's gradient; `data` is null if no memory is
 * shared. */
int32_t ballast_gradient_memory(ballast_session* session, int32_t chunk, void** data,
                                size_t* bytes);
/* For people who look at the job (its history, metrics, page): a named number of the step that
 * is sealed or voted on next. At most 16 names of 1 to 64 letters, digits, '.', '_', '/' and
 * '-'. Any value, including NaN. It affects no decision. The lowest rank that reports any
 * counts. Since version 7, as the next function. */
int32_t ballast_report_number(ballast_session* session, const char* name, double value);
/* How this rank spent its time from its last seal, or its start, to the next seal. compute:
 * forward, backward and everything else. reduce: waiting for collectives among ranks. send:
 * giving gradients to the service. wait: waiting for the decision and the weights. The page
 * shows the rank that computed longest. */
int32_t ballast_report_seconds(ballast_session* session, double compute, double reduce, double send,
                               double wait);
/* Ends this rank's part of the step, waits for all ranks, and returns the norm. The step is
 * still undecided. group_norms may be null; it gets one for each group. FAILED_PRECONDITION: the
 * step is incomplete, and stays open. DEADLINE_EXCEEDED: call again to continue waiting.
 * ABORTED: close, open again, repeat the step. */
int32_t ballast_seal(ballast_session* session, uint32_t micro_steps, ballast_norm* norm,
                     double* group_norms, size_t group_count);
/* After ballast_seal; waits for the votes of all ranks. ballot null: zeros. FAILED_PRECONDITION:
 * the votes differ, ballast_message has the first difference, and all ranks vote again; or a
 * rank has discarded the attempt. DEADLINE_EXCEEDED: call again to continue waiting. */
int32_t ballast_vote(ballast_session* session, const ballast_ballot* ballot,
                     ballast_decision* decision);
/* The parameters, by index, without a gradient from any rank, in the step of the last norm or
 * decision. count: the known ones, at most the first 64. Writes up to `capacity` of them. */
int32_t ballast_unused(const ballast_session* session, size_t* out, size_t capacity, size_t* count);
/* ballast_seal and ballast_vote at once, without the norm and its round trip. */
int32_t ballast_seal_and_vote(ballast_session* session, uint32_t micro_steps,
                              const ballast_ballot* ballot, ballast_decision* decision);
/* Takes back what this rank has given in its attempt at the step. ballast_begin_step begins the
 * next attempt, which may have other settings. All ranks have to discard equally often, each at
 * any time, before one can seal; until then ballast_seal returns FAILED_PRECONDITION on the
 * others. Allowed also before ballast_begin_step, and after ballast_seal until there is a
 * decision. FAILED_PRECONDITION: the step is decided, receive its weights. DEADLINE_EXCEEDED:
 * call again to continue waiting. */
int32_t ballast_discard(ballast_session* session);
/* In a job with BALLAST_BY_WORKERS, after each applied decision and before ballast_receive_weights. Waits for
 * the directions of parameters with the rule Muon, and writes this rank's elements of them: count
 * (parameter_count) pointers, as in ballast_options.weights, to bf16. A pointer may be null if the parameter
 * has another rule. Ranks put matrices together from their elements, and orthogonalize them. values: room for
 * one of each group; the step's, with which O is made. wanted: 0 if nothing is to be given, because the step
 * changes no matrix, or an operator has ended the round; then values are left as they are. Since version 12, as
 * the next function. */
int32_t ballast_read_directions(ballast_session* session, void* const* directions, size_t count,
                                ballast_hyper_parameters* values, int32_t* wanted);
/* Gives O, what became of them: reads this rank's elements, in bf16. The session keeps a copy until
 * ballast_receive_weights has returned, for a service that crashes; with shared memory in the places of gradients. */
int32_t ballast_give_orthogonal(ballast_session* session, const void* const* orthogonal,
                                size_t count);
/* Returns when this rank's weights of the decided step are in place. */
int32_t ballast_receive_weights(ballast_session* session);
/* Optional, before ballast_receive_weights: returns when the weights of these parameters, by
 * index, are in place. Others may still arrive. So a forward pass can begin with the first
 * layers. These weights are not written again in this step. ballast_receive_weights is still
 * needed to end the step. If the step was skipped, it returns at once. FAILED_PRECONDITION: no
 * step is decided. DEADLINE_EXCEEDED: call again to continue waiting. Since version 5. */
int32_t ballast_await_weights(ballast_session* session, const size_t* parameters, size_t count);

/* directory: a name under the service's --checkpoint-dir, or a directory on its host. A save
 * makes a new checkpoint there and replaces none. A load takes the newest undamaged one, or the
 * named one ("gpt/step-1000.2"). It ends the sessions of all ranks, including this one. */
int32_t ballast_save(ballast_session* session, const char* directory);
int32_t ballast_load(ballast_session* session, const char* directory);

/* Undoes the last committed step of a job with keep_previous, exactly. It ends the sessions of
 * all ranks, including this one. Reopened sessions are at the step before. undone_step may be
 * null. FAILED_PRECONDITION: a rank has begun the next step, or no step can be undone. Only one
 * step can be undone, and none from before a load. */
int32_t ballast_undo(ballast_session* session, uint64_t* undone_step);

/* Calls without a session. They use these options: the service, the TLS files and the token;
 * wait_seconds, the longest time of one call (0: 600); reconnect_timeout_seconds, the time for
 * which a read-only call is retried while the service is unreachable (0: 60).
 *
 *   ballast_call(&options, "JobService/GetJob", "{\"name\": \"jobs/gpt\"}", &response)
 *
 * Any unary call of proto/ballast/v1; a list returns all pages. Request and response are protobuf's
 * JSON of its messages, with the field names of the .proto and 64-bit integers as numbers.
 * `response` is valid until the thread's next ballast_call. */
int32_t ballast_call(const ballast_options* options, const char* method, const char* request,
                     const char** response);
/* A plane of a whole parameter, "jobs/gpt/parameters/wte", at the committed step, while training
 * goes on. `elements` is the parameter's number of elements. update_count: the number of its
 * updates. INVALID_ARGUMENT: the parameter is frozen, the plane does not exist, or the number of
 * elements differs. */
int32_t ballast_read_state(const ballast_options* options, const char* parameter, int32_t plane,
                           float* out, int64_t elements, uint64_t* step, int64_t* update_count);

/* For one rank of a job, which tells the others: the services of options.job in a cluster, whose
 * address "etcd://HOST:PORT/PREFIX" is options.service. They are those of the job's record; for a new
 * job the fewest that have room, or as many as "?members=N" or "?members=all" behind the address says.
 * `services`: "a:7070" or "a:7070,b:7070", rank 0's home first, until the thread's next call of this
 * function. etcd is reached with the files and the user of BALLAST_ETCD_CA, _CERT, _KEY, _USER and
 * _PASSWORD_FILE. RESOURCE_EXHAUSTED: no services have room. NOT_FOUND: no service is registered.
 * Since version 10. */
int32_t ballast_find_services(const ballast_options* options, const char** services);

/* A key and a certificate for a service that this process starts and that others reach at `host`, an
 * IP address: PEM texts for its --tls-key and --tls-cert. Who trusts this certificate (tls_ca,
 * --tls-client-ca) knows the service by it, and no other one. Valid until the thread's next call of
 * this function. INVALID_ARGUMENT: `host` is not an address. Since version 10. */
int32_t ballast_make_identity(const char* host, const char** certificate, const char** key);

#ifdef __cplusplus
}
#endif

#endif /* BALLAST_CLIENT_BALLAST_H_ */
