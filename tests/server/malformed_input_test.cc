// What malformed and impossible requests get: a named status, one line, and a service that runs on.
#include <gmock/gmock.h>

#include <functional>
#include <limits>

#include "google/rpc/status.pb.h"
#include "server/job_message.h"
#include "server/transport_settings.h"
#include "tests/server/service_for_tests.h"

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

class MalformedInput : public testing::Test {
 protected:
  // Every error carries its reason; and the service still answers.
  void ExpectRefused(const grpc::Status& status, grpc::StatusCode code, const std::string& what) {
    EXPECT_EQ(status.error_code(), code) << what << ": " << status.error_message();
    EXPECT_THAT(status.error_message(), AllOf(Not(""), Not(HasSubstr("\n")))) << what;
    google::rpc::Status details;
    EXPECT_TRUE(details.ParseFromString(status.error_details())) << what;
    ASSERT_EQ(details.details_size(), 1) << what;
    google::rpc::ErrorInfo info;
    EXPECT_TRUE(details.details(0).UnpackTo(&info)) << what;
    EXPECT_EQ(info.domain(), "ballast") << what;
    EXPECT_NE(info.reason(), "") << what;
    ExpectAnswers(what);
  }

  void ExpectAnswers(const std::string& what) {
    grpc::ClientContext context;
    v1::ListJobsResponse response;
    const grpc::Status status = service_.jobs().ListJobs(&context, {}, &response);
    ASSERT_TRUE(status.ok()) << what << ": " << status.error_message();
  }

  grpc::Status Create(const v1::Job& job) {
    grpc::ClientContext context;
    v1::CreateJobRequest request;
    *request.mutable_job() = job;
    v1::Job response;
    return service_.jobs().CreateJob(&context, request, &response);
  }

  ServiceForTests service_;
};

struct BadJob {
  const char* what;
  std::function<void(v1::Job&)> spoil;
};

TEST_F(MalformedInput, CreateJobRefusesWhatCanNeverWork) {
  const BadJob kBadJobs[] = {
      {"no name", [](v1::Job& job) { job.clear_name(); }},
      {"a name that leads out of a directory", [](v1::Job& job) { job.set_name("jobs/../x"); }},
      {"no ranks", [](v1::Job& job) { job.set_world_size(0); }},
      {"negative ranks", [](v1::Job& job) { job.set_world_size(-1); }},
      {"two billion ranks", [](v1::Job& job) { job.set_world_size(2000000000); }},
      {"a gap", [](v1::Job& job) { job.mutable_partitions(1)->set_end(256 + 0); }},
      {"a gap at the end", [](v1::Job& job) { job.mutable_partitions()->RemoveLast(); }},
      {"an overlap", [](v1::Job& job) { job.mutable_partitions(1)->set_begin(0); }},
      {"a range past the end", [](v1::Job& job) { job.mutable_partitions(2)->set_end(512); }},
      {"half a block", [](v1::Job& job) { job.mutable_partitions(0)->set_end(255); }},
      {"a range that ends before it begins",
       [](v1::Job& job) { job.mutable_partitions(0)->set_end(-256); }},
      {"an endless range", [](v1::Job& job) { job.mutable_partitions(0)->set_end(kHuge); }},
      {"an unknown rank", [](v1::Job& job) { job.mutable_partitions(0)->set_rank(2); }},
      {"an unknown group", [](v1::Job& job) { job.mutable_partitions(0)->set_group(-1); }},
      {"a parameter of no group", [](v1::Job& job) { job.mutable_parameters(0)->set_group(7); }},
      {"a negative shape", [](v1::Job& job) { job.mutable_parameters(0)->set_shape(0, -3); }},
      {"a shape that overflows",
       [](v1::Job& job) {
         job.mutable_parameters(0)->set_shape(0, kHuge);
         job.mutable_parameters(0)->add_shape(kHuge);
       }},
      {"the same name twice", [](v1::Job& job) { job.mutable_parameters(0)->set_name("b"); }},
      {"no parameter name", [](v1::Job& job) { job.mutable_parameters(0)->clear_name(); }},
      {"the same group twice", [](v1::Job& job) { job.mutable_groups(1)->set_name("decay"); }},
      {"a missing lr",
       [](v1::Job& job) { job.mutable_groups(0)->mutable_hyper_parameters()->clear_lr(); }},
      {"beta of one",
       [](v1::Job& job) { job.mutable_groups(0)->mutable_hyper_parameters()->set_beta1(1); }},
      {"an lr that is no number",
       [](v1::Job& job) { job.mutable_groups(0)->mutable_hyper_parameters()->set_lr(NAN); }},
      {"an unknown dtype",
       [](v1::Job& job) { job.mutable_groups(0)->set_wire_dtype(static_cast<v1::DType>(9)); }},
      {"odd chunks", [](v1::Job& job) { job.set_chunk_elements(100); }},
      {"negative chunks", [](v1::Job& job) { job.set_chunk_elements(-256); }},
      {"huge chunks", [](v1::Job& job) { job.set_chunk_elements(kHuge); }},
      {"a clipping norm that is no number", [](v1::Job& job) { job.set_max_norm(NAN); }},
  };
  for (const BadJob& bad : kBadJobs) {
    v1::Job job = TinyJob("bad");
    bad.spoil(job);
    ExpectRefused(Create(job), grpc::StatusCode::INVALID_ARGUMENT, bad.what);
  }
  EXPECT_TRUE(service_.engine().ListJobs().empty());
  EXPECT_EQ(service_.engine().memory().used_bytes(), 0);
}

TEST_F(MalformedInput, AJobThatDoesNotFitIsRefusedWithTheSizes) {
  v1::Job job = TinyJob("large");
  job.mutable_parameters(1)->set_shape(0, 84 + (int64_t{1} << 30));
  job.mutable_partitions(1)->set_end(512 + (int64_t{1} << 30));
  job.set_chunk_elements(0);
  const grpc::Status status = Create(job);
  ExpectRefused(status, grpc::StatusCode::RESOURCE_EXHAUSTED, "a large job");
  EXPECT_THAT(status.error_message(),
              AllOf(HasSubstr("large"), HasSubstr("need"), HasSubstr("used"), HasSubstr("limit")));
  EXPECT_THAT(status.error_message(), HasSubstr(std::to_string(kTestMemoryBytes)));
  EXPECT_EQ(service_.engine().memory().used_bytes(), 0);
}

// Frozen parameters: only the description is large.
v1::Job JobOfManyParameters(int count) {
  v1::Job job = TinyJob(std::string(128, 'j'));
  for (int i = 0; i < count; ++i) {
    v1::Parameter& parameter = *job.add_parameters();
    parameter.set_name(std::to_string(i));
    parameter.add_shape(1);
  }
  return job;
}

TEST_F(MalformedInput, AJobWhoseReplyWouldBeTooLargeIsRefusedBeforeItIsCreated) {
  const v1::Job job = JobOfManyParameters(200000);
  ASSERT_LT(job.ByteSizeLong(), kMaxMessageBytes / 4);
  const grpc::Status status = Create(job);
  ExpectRefused(status, grpc::StatusCode::INVALID_ARGUMENT, "a long description");
  EXPECT_THAT(status.error_message(), HasSubstr(std::to_string(kMaxMessageBytes)));
  EXPECT_TRUE(service_.engine().ListJobs().empty());
}

TEST_F(MalformedInput, AJobWhoseReplyIsLargeIsCreatedAndAnswersAttach) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  service_.Use(grpc::CreateCustomChannel(service_.server().addresses()[0],
                                         grpc::InsecureChannelCredentials(), arguments));
  const grpc::Status status = Create(JobOfManyParameters(150000));
  ASSERT_TRUE(status.ok()) << status.error_message();
  TestWorker worker(service_, std::string(128, 'j'), 0, Codec::kGenerated);
  const grpc::Status attached = worker.Attach();
  ASSERT_TRUE(attached.ok()) << attached.error_message();
  const size_t reply_bytes = worker.attachment().ByteSizeLong();
  EXPECT_GT(reply_bytes, kMaxMessageBytes * 3 / 4);
  EXPECT_LE(reply_bytes, LargestMessageBytes(service_.engine().ListJobs()[0]->spec()));
}

TEST_F(MalformedInput, UnaryCallsNameWhatIsWrong) {
  CreateTinyJob(service_, "tiny");
  ExpectRefused(Create(TinyJob("tiny")), grpc::StatusCode::ALREADY_EXISTS, "the job again");

  const auto refuse = [&](grpc::StatusCode code, const std::string& what, const auto& call) {
    grpc::ClientContext context;
    ExpectRefused(call(&context), code, what);
  };
  using Code = grpc::StatusCode;
  for (const auto& [name, code] :
       {std::pair{"jobs/none", Code::NOT_FOUND}, std::pair{"tiny", Code::INVALID_ARGUMENT},
        std::pair{"", Code::INVALID_ARGUMENT}}) {
    refuse(code, std::string("GetJob ") + name, [&, name = name](grpc::ClientContext* context) {
      v1::GetJobRequest request;
      request.set_name(name);
      v1::Job response;
      return service_.jobs().GetJob(context, request, &response);
    });
    refuse(code, std::string("CloseJob ") + name, [&, name = name](grpc::ClientContext* context) {
      v1::CloseJobRequest request;
      request.set_name(name);
      v1::CloseJobResponse response;
      return service_.jobs().CloseJob(context, request, &response);
    });
    refuse(code, std::string("AbortStep ") + name, [&, name = name](grpc::ClientContext* context) {
      v1::AbortStepRequest request;
      request.set_name(name);
      v1::AbortStepResponse response;
      return service_.jobs().AbortStep(context, request, &response);
    });
  }
  const auto update = [&](const std::string& name, const v1::HyperParameters& changes) {
    return [&, name, changes](grpc::ClientContext* context) {
      v1::UpdateGroupRequest request;
      request.set_name(name);
      *request.mutable_changes() = changes;
      v1::ParamGroup response;
      return service_.jobs().UpdateGroup(context, request, &response);
    };
  };
  v1::HyperParameters negative, amsgrad;
  negative.set_lr(-1);
  amsgrad.set_amsgrad(true);
  refuse(Code::NOT_FOUND, "an unknown group", update("jobs/tiny/groups/x", {}));
  refuse(Code::INVALID_ARGUMENT, "a job as a group", update("jobs/tiny", {}));
  refuse(Code::INVALID_ARGUMENT, "a negative lr", update("jobs/tiny/groups/decay", negative));
  refuse(Code::INVALID_ARGUMENT, "amsgrad", update("jobs/tiny/groups/decay", amsgrad));

  const auto attach = [&](int rank, const std::string& uid, int64_t step, bool other_job) {
    return [&, rank, uid, step, other_job](grpc::ClientContext* context) {
      v1::AttachWorkerRequest request;
      request.set_name("jobs/tiny");
      request.set_rank(rank);
      request.set_process_id("p");
      request.set_uid(uid);
      if (step >= 0) request.set_expected_committed_step(step);
      if (other_job) {
        *request.mutable_job() = TinyJob("tiny");
        request.mutable_job()->mutable_parameters(0)->set_shape(0, 301);
      }
      v1::AttachWorkerResponse response;
      return service_.jobs().AttachWorker(context, request, &response);
    };
  };
  refuse(Code::INVALID_ARGUMENT, "rank 2 of 2", attach(2, "", -1, false));
  refuse(Code::INVALID_ARGUMENT, "rank -1", attach(-1, "", -1, false));
  refuse(Code::NOT_FOUND, "another uid", attach(0, "x", -1, false));
  refuse(Code::FAILED_PRECONDITION, "another step", attach(0, "", 4, false));
  refuse(Code::FAILED_PRECONDITION, "another layout", attach(0, "", -1, true));
}

TEST_F(MalformedInput, StateCallsNameWhatIsWrong) {
  CreateTinyJob(service_, "tiny");
  using Code = grpc::StatusCode;
  const auto read = [&](const std::string& name, v1::Plane plane) {
    grpc::ClientContext context;
    v1::ReadStateRequest request;
    request.set_name(name);
    request.set_plane(plane);
    const auto reader = service_.state().ReadState(&context, request);
    v1::ReadStateResponse response;
    EXPECT_FALSE(reader->Read(&response));
    return reader->Finish();
  };
  ExpectRefused(read("jobs/tiny/parameters/x", v1::MASTER), Code::NOT_FOUND, "no parameter");
  ExpectRefused(read("jobs/x/parameters/w", v1::MASTER), Code::NOT_FOUND, "no job");
  ExpectRefused(read("w", v1::MASTER), Code::INVALID_ARGUMENT, "a bare name");
  ExpectRefused(read("jobs/tiny/parameters/w", v1::PLANE_UNSPECIFIED), Code::INVALID_ARGUMENT,
                "no plane");
  ExpectRefused(read("jobs/tiny/parameters/w", v1::MAX_EXP_AVG_SQ), Code::INVALID_ARGUMENT,
                "a plane of amsgrad");
  ExpectRefused(read("jobs/tiny/parameters/fixed", v1::MASTER), Code::INVALID_ARGUMENT, "frozen");
  {
    grpc::ClientContext context;
    v1::SummarizeStateRequest request;
    request.set_name("jobs/tiny/parameters/x");
    v1::StateSummary response;
    ExpectRefused(service_.state().SummarizeState(&context, request, &response), Code::NOT_FOUND,
                  "summary of no parameter");
  }
  {
    grpc::ClientContext context;
    v1::SaveJobRequest request;
    request.set_name("jobs/tiny");
    request.set_directory("relative");
    v1::SaveJobResponse response;
    ExpectRefused(service_.state().SaveJob(&context, request, &response), Code::INVALID_ARGUMENT,
                  "a relative directory");
  }
  {
    grpc::ClientContext context;
    v1::LoadJobRequest request;
    request.set_name("jobs/tiny");
    request.set_directory("/nonexistent/checkpoint");
    v1::LoadJobResponse response;
    ExpectRefused(service_.state().LoadJob(&context, request, &response), Code::NOT_FOUND,
                  "no checkpoint");
  }
}

// A valid stream of rank 0 in step 1, then one bad message.
class MalformedTrain : public MalformedInput {
 protected:
  void SetUp() override {
    CreateTinyJob(service_, "tiny");
    ASSERT_TRUE(worker_.Attach().ok());
  }

  grpc::Status StatusAfter(const std::function<void(v1::TrainRequest&)>& spoil) {
    worker_.OpenStream();
    worker_.Begin(1);
    v1::TrainRequest message;
    message.mutable_gradient()->mutable_header()->set_step(1);
    message.mutable_gradient()->mutable_header()->set_micro_step_end(1);
    message.mutable_gradient()->set_payload(std::string(512, '\0'));
    spoil(message);
    EXPECT_TRUE(worker_.Write(message));
    return worker_.ReadUntilEnd();
  }

  // An upload of nothing.
  grpc::Status Upload(const v1::OpenTrain& open) {
    grpc::ClientContext context;
    v1::UploadWeightsResponse response;
    const auto stream = service_.train().UploadWeights(&context, &response);
    v1::UploadWeightsRequest request;
    *request.mutable_open() = open;
    stream->Write(request);
    stream->WritesDone();
    return stream->Finish();
  }

  TestWorker worker_{service_, "tiny", 0, Codec::kGenerated};
};

TEST_F(MalformedTrain, GradientsThatDoNotFitAreRefused) {
  using Code = grpc::StatusCode;
  const struct {
    const char* what;
    Code code;
    std::function<void(v1::TrainRequest&)> spoil;
  } kCases[] = {
      {"one byte less", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_payload()->pop_back(); }},
      {"fp32 instead of bf16", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_payload()->resize(1024); }},
      {"no payload", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->clear_payload(); }},
      {"payload of an empty contribution", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_empty(true); }},
      {"unknown chunk", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_chunk(3); }},
      {"the largest chunk", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_chunk(~0u); }},
      {"another rank's chunk", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_chunk(1); }},
      {"a later step", Code::FAILED_PRECONDITION,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_step(2); }},
      {"a micro-step left out", Code::FAILED_PRECONDITION,
       [](v1::TrainRequest& m) {
         m.mutable_gradient()->mutable_header()->set_micro_step_begin(1);
         m.mutable_gradient()->mutable_header()->set_micro_step_end(2);
       }},
      {"no micro-steps", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_micro_step_end(0); }},
      {"begin of a later step", Code::FAILED_PRECONDITION,
       [](v1::TrainRequest& m) { m.mutable_begin_step()->set_step(5); }},
      {"another divisor", Code::FAILED_PRECONDITION,
       [](v1::TrainRequest& m) { m.mutable_begin_step()->set_step(1); }},
      {"an unknown parameter", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) {
         m.mutable_end_micro_step()->set_step(1);
         m.mutable_end_micro_step()->add_used_parameters(1 << 30);
       }},
      {"a negative parameter", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) {
         m.mutable_end_micro_step()->set_step(1);
         m.mutable_end_micro_step()->add_used_parameters(-1);
       }},
      {"a seal of no micro-steps", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_seal()->set_step(1); }},
      {"open again", Code::INVALID_ARGUMENT, [](v1::TrainRequest& m) { m.mutable_open(); }},
      {"nothing", Code::INVALID_ARGUMENT, [](v1::TrainRequest& m) { m.Clear(); }},
  };
  const std::string hash = service_.StateHash("tiny");
  for (const auto& test : kCases) {
    ExpectRefused(StatusAfter(test.spoil), test.code, test.what);
  }
  EXPECT_EQ(service_.StateHash("tiny"), hash);
}

TEST_F(MalformedTrain, StreamsThatDoNotOpenRightAreRefused) {
  using Code = grpc::StatusCode;
  const struct {
    const char* what;
    Code code;
    std::function<void(v1::OpenTrain&)> spoil;
  } kCases[] = {
      {"no job", Code::NOT_FOUND, [](v1::OpenTrain& open) { open.set_name("jobs/x"); }},
      {"no name", Code::INVALID_ARGUMENT, [](v1::OpenTrain& open) { open.clear_name(); }},
      {"another uid", Code::NOT_FOUND, [](v1::OpenTrain& open) { open.set_uid("x"); }},
      {"rank 9", Code::INVALID_ARGUMENT, [](v1::OpenTrain& open) { open.set_rank(9); }},
      {"another process", Code::ABORTED, [](v1::OpenTrain& open) { open.set_process_id("x"); }},
      {"another generation", Code::ABORTED, [](v1::OpenTrain& open) { open.set_generation(99); }},
  };
  for (const auto& test : kCases) {
    v1::OpenTrain open = worker_.OpenMessage();
    test.spoil(open);
    {
      grpc::ClientContext context;
      const auto stream = service_.train().Train(&context);
      v1::TrainRequest request;
      *request.mutable_open() = open;
      stream->Write(request);
      v1::TrainResponse response;
      EXPECT_FALSE(stream->Read(&response));
      ExpectRefused(stream->Finish(), test.code, std::string("Train, ") + test.what);
    }
    ExpectRefused(Upload(open), test.code, std::string("UploadWeights, ") + test.what);
  }
}

TEST_F(MalformedTrain, UploadsThatDoNotFitAreRefused) {
  grpc::ClientContext create_context;
  v1::CreateJobRequest create;
  *create.mutable_job() = TinyJob("empty");
  v1::Job job;
  ASSERT_TRUE(service_.jobs().CreateJob(&create_context, create, &job).ok());
  {
    v1::OpenTrain nobody;
    nobody.set_name(job.name());
    nobody.set_uid(job.uid());
    nobody.set_generation(job.generation());
    ExpectRefused(Upload(nobody), grpc::StatusCode::ABORTED, "no process, on a free rank");
  }
  TestWorker worker(service_, "empty", 0, Codec::kGenerated);
  ASSERT_TRUE(worker.Attach().ok());
  const auto upload = [&](uint64_t step, uint32_t chunk, size_t bytes, bool open_first) {
    grpc::ClientContext context;
    v1::UploadWeightsResponse response;
    const auto stream = service_.train().UploadWeights(&context, &response);
    v1::UploadWeightsRequest request;
    if (open_first) {
      *request.mutable_open() = worker.OpenMessage();
      stream->Write(request);
    }
    request.mutable_weights()->mutable_header()->set_step(step);
    request.mutable_weights()->mutable_header()->set_chunk(chunk);
    request.mutable_weights()->set_payload(std::string(bytes, '\0'));
    stream->Write(request);
    stream->WritesDone();
    return stream->Finish();
  };
  using Code = grpc::StatusCode;
  ExpectRefused(upload(0, 0, 1023, true), Code::INVALID_ARGUMENT, "a byte less");
  ExpectRefused(upload(0, 0, 512, true), Code::INVALID_ARGUMENT, "bf16 instead of fp32");
  ExpectRefused(upload(0, 1, 1024, true), Code::INVALID_ARGUMENT, "another rank's chunk");
  ExpectRefused(upload(0, 77, 1024, true), Code::INVALID_ARGUMENT, "an unknown chunk");
  ExpectRefused(upload(3, 0, 1024, true), Code::INVALID_ARGUMENT, "a step");
  ExpectRefused(upload(0, 0, 1024, false), Code::INVALID_ARGUMENT, "weights before open");
  const grpc::Status again = worker_.Upload();
  ExpectRefused(again, Code::FAILED_PRECONDITION, "weights for a job that has some");
}

TEST_F(MalformedTrain, ReadsOfWeightsThatAreNotThereAreRefused) {
  const auto read = [&](const std::function<void(v1::ReadWeightsRequest&)>& spoil) {
    grpc::ClientContext context;
    v1::ReadWeightsRequest request;
    request.set_name("jobs/tiny");
    request.set_uid(worker_.attachment().uid());
    spoil(request);
    const auto reader = service_.train().ReadWeights(&context, request);
    v1::ReadWeightsResponse response;
    EXPECT_FALSE(reader->Read(&response));
    return reader->Finish();
  };
  using Code = grpc::StatusCode;
  ExpectRefused(read([](auto& request) { request.set_uid("x"); }), Code::NOT_FOUND, "uid");
  ExpectRefused(read([](auto& request) { request.set_name("x"); }), Code::INVALID_ARGUMENT, "name");
  ExpectRefused(read([](auto& request) { request.set_step(1); }), Code::FAILED_PRECONDITION,
                "step");
  ExpectRefused(read([](auto& request) { request.add_chunks(3); }), Code::INVALID_ARGUMENT,
                "chunk");
}

TEST_F(MalformedTrain, AMessageBeyondTheLimitEndsItsStreamOnly) {
  worker_.OpenStream();
  v1::TrainRequest message;
  message.mutable_gradient()->set_payload(std::string(40 << 20, '\0'));
  worker_.Write(message);
  EXPECT_EQ(worker_.ReadUntilEnd().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  ExpectAnswers("a large message");
}

}  // namespace
}  // namespace ballast::server
